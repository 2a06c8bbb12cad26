// An observer adds events of units to those that fsdp::Forward and autograd
// report; the sharded model calls it at each event.
#ifndef FSDP_MODEL_UNIT_OBSERVER_H_
#define FSDP_MODEL_UNIT_OBSERVER_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// Called on the thread that reports the event, also for events that the
// observer adds. An error ends the event as the event's own errors do.
class UnitObserver {
 public:
  virtual ~UnitObserver() = default;

  virtual absl::Status BeforePreForward(int unit) = 0;
  // Called only if the event has succeeded.
  virtual void AfterPreForward(int unit) = 0;
  virtual absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) = 0;
  // `exits` are the nodes by which a backward enters what the forward recorded.
  virtual void AfterPostForward(
      int unit,
      const std::vector<std::shared_ptr<torch::autograd::Node>>& exits) = 0;
  virtual absl::Status BeforePreBackward(int unit) = 0;
  virtual absl::Status BeforePostBackward(int unit) = 0;
  virtual absl::Status BeforeEndOfBackward() = 0;
  // Forward and backward are over for all units.
  virtual void OnGivenUp() = 0;

  // Returns an error that could not be thrown where it was found, once.
  virtual absl::Status TakeFailure() = 0;
};

}  // namespace fsdp

#endif  // FSDP_MODEL_UNIT_OBSERVER_H_
