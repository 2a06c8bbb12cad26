// Lets ranks wait for each other's disks, however long those take.
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

// How much a rank that acts has done so far. Thread-safe.
class DiskProgress {
 public:
  // To be called when a call to the disk returns, which has put `bytes` on it.
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
  // Limits a round: a rank that does not answer within it is gone.
  absl::Duration timeout;
  // A rank is given up when none of its calls to its disk returns for so long.
  absl::Duration stall_timeout;
  // The time between two rounds while this rank acts.
  absl::Duration interval = absl::Seconds(1);
  std::string what;       // "saving step 7", for the error
  int64_t all_bytes = 0;  // that this rank writes, for the error
  // Called with an error as soon as there is one, on another thread, before
  // `act` has returned. May be null.
  std::function<void(const absl::Status&)> on_error = nullptr;
};

// Runs `act`, which throws nothing, on the calling thread, while another thread
// tells the other ranks in rounds that this one is alive and how far it is.
// Collective. Returns OK when `act` has returned on all ranks. Otherwise it
// returns when this rank's has: DeadlineExceeded, the same on all ranks, which
// names the rank that was given up and leaves the communicator usable; or the
// communicator's error.
absl::Status ActInRounds(comm::Communicator& ranks, const RoundOptions& options,
                         const DiskProgress& progress,
                         absl::FunctionRef<void()> act);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_ROUNDS_H_
