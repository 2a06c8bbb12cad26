// Optimizers whose step can be captured (fsdp/capture/step_capture.h).
#ifndef FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_
#define FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

// What the host decides in a step, its learning rates and its number, is read
// by a captured step from memory of the device.
class CapturableOptimizer {
 public:
  virtual ~CapturableOptimizer() = default;

  // From now on steps, also those that are not captured, take learning rates
  // as numbers of the device, in float, as torch.optim does with capturable:
  // captured or not, they have the same bits.
  virtual void KeepRatesOnDevice() = 0;

  // Between these, step() is captured. All that it allocates was allocated by
  // an earlier one; FailedPrecondition from step() otherwise. It counts when it
  // is replayed. The number of the capture, by which it is replayed.
  virtual absl::StatusOr<int64_t> BeginCapture() = 0;
  virtual void EndCapture() = 0;

  // Gives the current stream the learning rates of now and the numbers of the
  // step that comes, for one replay behind it. States that were loaded since
  // are taken up. FailedPrecondition, naming it, where something else has
  // changed since the capture, or `capture` is not the last.
  virtual absl::Status PrepareReplay(int64_t capture) = 0;
  // That the replay is given to the device.
  virtual void CountReplay() = 0;
};

}  // namespace fsdp

#endif  // FSDP_OPTIM_CAPTURABLE_OPTIMIZER_H_
