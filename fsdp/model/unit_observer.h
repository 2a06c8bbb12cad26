// What a sharded model tells an observer that adds events of units to those
// which fsdp::Forward and autograd report.
#ifndef FSDP_MODEL_UNIT_OBSERVER_H_
#define FSDP_MODEL_UNIT_OBSERVER_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// Called in the thread that reports the event, also for the events that the
// observer itself adds. An error ends the event as its own errors do.
class UnitObserver {
 public:
  virtual ~UnitObserver() = default;

  virtual absl::Status BeforePreForward(int unit) = 0;
  // Only when it has succeeded.
  virtual void AfterPreForward(int unit) = 0;
  virtual absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) = 0;
  // `exits`: the nodes by which a backward enters what the forward recorded.
  virtual void AfterPostForward(
      int unit,
      const std::vector<std::shared_ptr<torch::autograd::Node>>& exits) = 0;
  virtual absl::Status BeforePreBackward(int unit) = 0;
  virtual absl::Status BeforePostBackward(int unit) = 0;
  virtual absl::Status BeforeEndOfBackward() = 0;
  // Forward and backward are over for all units.
  virtual void OnGivenUp() = 0;

  // An error that could not be thrown where it was found; OK from then on.
  virtual absl::Status TakeFailure() = 0;
};

}  // namespace fsdp

#endif  // FSDP_MODEL_UNIT_OBSERVER_H_
