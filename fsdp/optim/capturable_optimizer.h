// The interface of optimizers whose step can be captured
// (fsdp/capture/step_capture.h).
#ifndef FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_
#define FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

// A captured step reads what the host decides, learning rates and the number of
// the step, from memory of the device.
class CapturableOptimizer {
 public:
  virtual ~CapturableOptimizer() = default;

  // Makes all later steps, captured or not, read learning rates in float from
  // the device, as torch.optim does with capturable, so that both give the same
  // bits.
  virtual void KeepRatesOnDevice() = 0;

  // Between these calls step() is captured, and does not count until it is
  // replayed. An earlier step has to have allocated all that it needs, or else
  // step() returns FailedPrecondition. The result is the capture's number, for
  // PrepareReplay(). Unimplemented: parameters or states are offloaded.
  virtual absl::StatusOr<int64_t> BeginCapture() = 0;
  virtual void EndCapture() = 0;

  // Copies the present learning rates and the numbers of the next step to the
  // device, on the current stream, for one replay that follows there. It takes
  // up states that were loaded. FailedPrecondition, with the reason: something
  // else has changed since the capture, or `capture` is not the last.
  virtual absl::Status PrepareReplay(int64_t capture) = 0;
  // Counts a step, when the replay has been given to the device.
  virtual void CountReplay() = 0;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_
