// Lets a model run without its values, or in another dtype than it is stored
// in.
#ifndef PLANNER_CHOOSE_STAND_INS_H_
#define PLANNER_CHOOSE_STAND_INS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "fsdp/setup/shard_plan.h"

namespace fsdp {

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

#endif  // PLANNER_CHOOSE_STAND_INS_H_
