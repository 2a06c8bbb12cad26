// Where the ranks of one process meet for their collectives. Knows nothing of
// tensors.
#ifndef COMM_LOCAL_RENDEZVOUS_H_
#define COMM_LOCAL_RENDEZVOUS_H_

#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/call.h"

namespace fsdp::comm {

// The k-th call of every rank is one operation. Entering never blocks: the last
// rank to enter an operation runs its action for all. The first failure (calls
// that differ, a missed deadline, Abort, a rank that left) ends the whole
// group: every unfinished and later operation fails with it. Thread-safe; one
// rank's calls must be ordered by the caller.
class Rendezvous {
 public:
  // Does the work of one operation; payloads[r] is what rank r passed.
  using Action = std::function<void(absl::Span<const std::any> payloads)>;

  // One operation; shared by the ranks that entered it.
  class Operation;

  // Of these ranks, whose names errors say.
  explicit Rendezvous(RankNames names);

  int world_size() const { return names_.size(); }
  const RankNames& names() const { return names_; }

  // Enters the next operation of `rank`. All ranks must pass an equal `call`,
  // payloads of one type and equivalent actions; the action of the last to
  // enter runs, in its thread, before Enter returns. `payload` is dropped as
  // soon as the operation is done or has failed. Fails at once when the group
  // has failed, with the errors of Wait.
  absl::StatusOr<std::shared_ptr<Operation>> Enter(int rank, const Call& call,
                                                   std::any payload,
                                                   const Action& action);

  // Blocks until `operation`, which `rank` has entered, is done. Errors as in
  // Work::Wait; a missed deadline is a failure of the group. An action that
  // already runs is waited for even past the deadline: it writes into the
  // caller's buffers.
  absl::Status Wait(int rank, const std::shared_ptr<Operation>& operation,
                    absl::Time deadline);

  // Fails the group on behalf of `rank`; later calls do nothing.
  void Abort(int rank, const absl::Status& reason);

  // `rank` makes no more calls. Operations that it has entered stay valid, all
  // others fail.
  void Leave(int rank);

 private:
  struct LastCall {
    Call call;
    int64_t sequence;
  };
  struct Failure {
    int rank;             // who failed the group
    absl::Status status;  // what that rank's own operations return
    std::string text;     // what the others are told
    absl::StatusCode code_of_others;
  };

  std::shared_ptr<Operation> FindOrAddLocked(int64_t sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailOnMismatchLocked(int rank, const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailOnAbsenteesLocked(const Operation& operation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailLocked(Failure failure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string LastSeenLocked(int rank) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ErrorLocked(int rank, const Call& call, int64_t sequence) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RankNames names_;
  absl::Mutex mutex_;
  // By rank.
  std::vector<int64_t> next_sequence_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::optional<LastCall>> last_call_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> left_ ABSL_GUARDED_BY(mutex_);
  // Operations that not all ranks have entered, by sequence number.
  std::map<int64_t, std::shared_ptr<Operation>> open_ ABSL_GUARDED_BY(mutex_);
  std::optional<Failure> failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::comm

#endif  // COMM_LOCAL_RENDEZVOUS_H_
