// Finds writes to unsharded parameters that no version counter tells of, such
// as weight.data().clamp_(-1, 1) in a forward. What becomes of them would
// depend on where unsharded parameters lie: lost with a copy, kept for all
// ranks where memory is shared.
#ifndef FSDP_TRANSPARENT_WRITE_WATCH_H_
#define FSDP_TRANSPARENT_WRITE_WATCH_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_observer.h"
#include "fsdp/transparent/op_observer.h"

namespace fsdp {

// Watches the operators of each unit's first forward with grad and without, in
// training mode and out of it: a model that writes to parameters does it every
// time, and later forwards cost nothing. The operator fails, and the forward is
// refused as one that modifies a parameter in place.
class WriteWatch final : public UnitObserver, private OpListener {
 public:
  // `model` owns the new object.
  explicit WriteWatch(ShardedModel* model);
  ~WriteWatch() override;

  absl::Status BeforePreForward(int) override { return absl::OkStatus(); }
  void AfterPreForward(int unit) override;
  absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) override;
  void AfterPostForward(
      int unit,
      const std::vector<std::shared_ptr<torch::autograd::Node>>& exits)
      override;
  absl::Status BeforePreBackward(int) override { return absl::OkStatus(); }
  absl::Status BeforePostBackward(int) override { return absl::OkStatus(); }
  absl::Status BeforeEndOfBackward() override { return absl::OkStatus(); }
  void OnGivenUp() override;
  absl::Status TakeFailure() override;

 private:
  static constexpr int kModes = 4;
  struct UnitState {
    StorageTag tag;
    std::array<bool, kModes> seen = {};
  };

  int Mode() const;
  void OnOperator(absl::Span<const int>, bool) override {}
  void OnWrite(const at::Tensor& tensor, int unit) override;

  ShardedModel* const model_;
  std::vector<UnitState> units_;
  int watched_ = 0;  // forwards under way
  std::optional<OpObserver> observer_;
  absl::Status failure_;
};

}  // namespace fsdp

#endif  // FSDP_TRANSPARENT_WRITE_WATCH_H_
