// Measures a forward and a backward of a model that is not sharded, module by
// module.
#ifndef PLANNER_CHOOSE_STEP_METER_H_
#define PLANNER_CHOOSE_STEP_METER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/choose/step_profile.h"

namespace fsdp {

// Runs `loss(rows)` and its backward several times: for few rows first, and for
// all of `rows` only if that fits `memory_bytes`; otherwise estimates that.
// Parameters that are deferred, or computed in another dtype than they are
// stored in, are zeros meanwhile, which take no memory on a CPU. Afterwards the
// model is as it was: values, buffers, gradients, random states. Memory is what
// LibTorch's allocators report for this thread. Errors: InvalidArgument if the
// loss is not one element that requires grad; what LibTorch throws.
absl::StatusOr<StepProfile> MeasureStep(
    const ShardPlan& plan, const std::function<at::Tensor(int64_t)>& loss,
    int64_t rows, int64_t memory_bytes);

// Lets a model run without its values, or in another dtype than it is stored
// in.

// While one lives, the model's parameters and buffers that are deferred, or
// computed in another dtype than they are stored in, are zeros of the dtype in
// which they are computed. On the CPU these zeros are pages that nothing has
// written, which take no memory. Afterwards all is as it was, including buffers
// that the model has written. Throws what LibTorch throws.
class StandIns {
 public:
  explicit StandIns(const ShardPlan& plan);
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;
  ~StandIns();

 private:
  struct Kept {
    at::Tensor tensor;
    at::Tensor original;  // the original, or a copy of a buffer's values
    bool is_copy;
  };

  void ReplaceAll(const ShardPlan& plan);
  void Replace(const at::Tensor& tensor, const at::Tensor& zeros);
  void Restore();

  std::vector<Kept> kept_;
};

// While one lives, each gradient of the model's parameters vanishes as soon as
// `on_gradient` has seen it. Afterwards parameters have their former gradients.
class VanishingGradients {
 public:
  using OnGradient = std::function<void(const at::Tensor& gradient)>;
  VanishingGradients(const ShardPlan& plan, const OnGradient& on_gradient);
  VanishingGradients(const VanishingGradients&) = delete;
  VanishingGradients& operator=(const VanishingGradients&) = delete;
  ~VanishingGradients();

 private:
  struct Kept {
    at::Tensor parameter;
    at::Tensor gradient;
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook;
  };
  std::vector<Kept> kept_;
};

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_METER_H_
