// Ranks that wait for each other's disks, however long those take.
#ifndef CHECKPOINT_SAVE_ROUNDS_H_
#define CHECKPOINT_SAVE_ROUNDS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// What a rank that acts has got done so far. Thread-safe.
class DiskProgress {
 public:
  // A call has come back from the disk, with so many bytes more on it.
  void CameBack(int64_t bytes) {
    bytes_ += bytes;
    ++calls_;
  }

  int64_t calls() const { return calls_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> calls_{0};
};

struct RoundOptions {
  // Of a round: whoever does not answer in it is gone.
  absl::Duration timeout;
  // A rank whose calls do not come back from its disk for so long is given up.
  absl::Duration stall_timeout;
  // Between two rounds while this rank acts.
  absl::Duration interval = absl::Seconds(1);
  std::string what;       // "saving step 7", for the error
  int64_t all_bytes = 0;  // that this rank writes, for the error
  // Gets the error as soon as there is one, from another thread, before `act`
  // has returned. May be null.
  std::function<void(const absl::Status&)> on_error = nullptr;
};

// Runs `act`, which throws nothing, on the calling thread, while another one
// tells the other ranks in rounds that this one is alive and how far it is. OK,
// once all ranks' `act` have returned. Otherwise, when this rank's has
// returned: DeadlineExceeded, the same on all ranks, which may use the
// communicator further, if a rank was given up, which the text names; or the
// communicator's error. A collective.
absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_ROUNDS_H_
