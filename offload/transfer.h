// A read, a write or a flush that has been started and may still be running.
#ifndef OFFLOAD_TRANSFER_H_
#define OFFLOAD_TRANSFER_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace fsdp::offload {

// Used by one thread at a time; may outlive its store.
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  // Blocks until the operation is over: the memory is the caller's again.
  virtual ~Transfer() = default;

  // Blocks until the operation is over; the caller may then use its memory.
  // Errors, each with region, file and offset where there are any:
  //   DeadlineExceeded   still running at `deadline`, memory still in use; a
  //                      later call waits on
  //   DataLoss           the bytes are not those that were last written
  //   ResourceExhausted  no space
  //   Unavailable        the device or the file system failed
  // After an error, what was to be read is of no use, and what was to be
  // written is damaged: reads of it are DataLoss until all of it is written
  // again. Any other result is final, and given again.
  virtual absl::Status Wait(absl::Time deadline) = 0;
};

// One that was over before it was given to the caller.
class FinishedTransfer : public Transfer {
 public:
  explicit FinishedTransfer(absl::Status result = absl::OkStatus())
      : result_(std::move(result)) {}

  absl::Status Wait(absl::Time /*deadline*/) override { return result_; }

 private:
  const absl::Status result_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_TRANSFER_H_
