// Ranks that save or load together, or a process that does alone.
#ifndef CHECKPOINT_RUN_TOGETHER_H_
#define CHECKPOINT_RUN_TOGETHER_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// What `act` returns, or, as a Status, what it throws: ranks that agree on it
// must not lose one. `what` it does, for errors.
absl::Status Caught(absl::string_view what,
                    absl::FunctionRef<absl::Status()> act);

class Together {
 public:
  // `ranks` outlives it; null: alone. `what` they do, for errors: "exporting a
  // model". `timeout`: of each call.
  Together(comm::Communicator* ranks, absl::string_view what,
           absl::Duration timeout)
      : ranks_(ranks), what_(what), timeout_(timeout) {}

  // Null: alone.
  comm::Communicator* ranks() const { return ranks_; }
  int rank() const { return ranks_ == nullptr ? 0 : ranks_->rank(); }
  absl::Time Deadline() const;

  // Collective: OK where it is OK on all ranks; otherwise one rank's error, on
  // all, "rank 2: " in front. Alone: `mine`.
  absl::Status Agree(const absl::Status& mine) const;
  // Collective: InvalidArgument on all ranks, naming the first line that
  // differs, where they do not pass the same. `of`: what it says.
  absl::Status CheckSame(const std::string& text, absl::string_view of) const;

 private:
  comm::Communicator* const ranks_;
  const std::string what_;
  const absl::Duration timeout_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_RUN_TOGETHER_H_
