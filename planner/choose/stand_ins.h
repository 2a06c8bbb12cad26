// Lets a model that has no values, or values of another dtype than it computes
// in, run all the same.
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

// As long as one lives, parameters and buffers of the model that are deferred,
// or are computed in another dtype than they are stored in, are zeros of the
// dtype that they are computed in. On the CPU these are pages that nothing has
// written, which take no memory. Afterwards all is as it was, buffers that the
// model has written included. Throws what LibTorch throws.
class StandIns {
 public:
  explicit StandIns(const ShardPlan& plan);
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;
  ~StandIns();

 private:
  struct Kept {
    at::Tensor tensor;
    at::Tensor original;  // what it was, or, of a buffer, a copy of its values
    bool is_copy;
  };

  void ReplaceAll(const ShardPlan& plan);
  void Replace(const at::Tensor& tensor, const at::Tensor& zeros);
  void Restore();

  std::vector<Kept> kept_;
};

// As long as one lives, gradients of the model's parameters vanish as soon as
// they are there and `on_gradient` has seen them. Afterwards parameters have
// those that they had.
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
