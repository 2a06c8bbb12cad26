// Losses on their way from the device to the host.
#ifndef TESTING_GPT_TRAINING_LOSS_QUEUE_H_
#define TESTING_GPT_TRAINING_LOSS_QUEUE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <deque>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/device_streams.h"

namespace gpt {

// A host that reads each loss at once makes the device wait for its next step;
// one that reads them a step late does not. Thread-compatible.
class LossQueue {
 public:
  // Starts to copy the loss of a step, one number, to the host.
  void Push(const at::Tensor& loss);

  size_t size() const { return losses_.size(); }

  // Waits until the device has computed the oldest loss, of which there is one,
  // and takes it. DeadlineExceeded: it has not; Internal: it has failed.
  absl::StatusOr<double> Pop(absl::Time deadline);

 private:
  struct Loss {
    at::Tensor value;  // on the host after `there`
    fsdp::DeviceEvent there;
  };

  std::deque<Loss> losses_;
};

}  // namespace gpt

#endif  // TESTING_GPT_TRAINING_LOSS_QUEUE_H_
