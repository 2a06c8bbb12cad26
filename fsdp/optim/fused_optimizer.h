// torch::optim's AdamW, Adam and SGD, stepped by torch's fused kernels, which
// Python has as fused=True. Over the shards of a model, which lie next to each
// other, a step is one call at the speed of memory.
//
//   fsdp::FusedAdamW optimizer(model->Parameters(),
//                              torch::optim::AdamWOptions(3e-4));
//
// They are torch::optim's optimizers to all that takes one: groups, schedulers,
// zero_grad(), MakeOptimizer(), state dicts and files, which either kind reads
// from the other. Results differ from torch::optim's in the last bits. They do
// not depend on the number of ranks, nor on how parameters are grouped.
#ifndef FSDP_OPTIM_FUSED_OPTIMIZER_H_
#define FSDP_OPTIM_FUSED_OPTIMIZER_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/rank_activity.h"
#include "fsdp/model/named_shard.h"
#include "fsdp/optim/capturable_optimizer.h"
#include "fsdp/resting/resting_places.h"

namespace fsdp {

class FusedStepper;

// What torch::optim's options lack. No part of states.
struct FusedOptions {
  bool maximize = false;  // goes up the gradient
  // The communicator's: that step() has begun and ended. Null: nobody is told.
  std::shared_ptr<comm::RankActivity> activity = nullptr;
};

// States of parameters that share memory, such as those of a unit, share
// memory, too. It is allocated in the first step, for all parameters that
// require grad. Not thread-safe.
//
// `Base`: the optimizer of torch::optim, `Options`: its options. Like it, a
// parameter without gradient is left alone. Gradients of another floating-point
// dtype than their parameter's are converted.
template <typename Base, typename Options>
class FusedOptimizer final : public Base,
                             public RestingStates,
                             public CapturableOptimizer {
 public:
  using typename Base::LossClosure;

  // Throws StatusError, InvalidArgument, for defaults that LibTorch refuses,
  // such as a negative learning rate.
  explicit FusedOptimizer(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const Options& defaults = Options(),
      const FusedOptions& fused = FusedOptions());
  explicit FusedOptimizer(std::vector<at::Tensor> parameters,
                          const Options& defaults = Options(),
                          const FusedOptions& fused = FusedOptions());
  FusedOptimizer(FusedOptimizer&&) noexcept;
  ~FusedOptimizer() override;

  // Throws StatusError, InvalidArgument with nothing changed, on what the
  // kernels cannot step: sparse tensors, parameters with gaps in memory or of
  // other dtypes than float, double, half and bfloat16.
  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Steps what of one unit has a gradient, and drops its gradients. Costs
  // nothing for other units: for StepInBackward(). Errors are as step() throws
  // them.
  absl::Status StepUnit(absl::Span<const NamedShard> unit);

  // See resting_states.h; optimizer state dicts call it.
  absl::Status TakeUpStates() override;
  absl::Status TakeUpStatesOf(absl::Span<const at::Tensor> parameters) override;

  // See capturable_optimizer.h; CapturedStep calls them.
  void KeepRatesOnDevice() override;
  absl::StatusOr<int64_t> BeginCapture() override;
  void EndCapture() override;
  absl::Status PrepareReplay(int64_t capture) override;
  void CountReplay() override;

  void save(torch::serialize::OutputArchive& archive) const override;

 private:
  std::shared_ptr<comm::RankActivity> activity_;
  std::unique_ptr<FusedStepper> stepper_;
};

using FusedAdamW =
    FusedOptimizer<torch::optim::AdamW, torch::optim::AdamWOptions>;
using FusedAdam = FusedOptimizer<torch::optim::Adam, torch::optim::AdamOptions>;
using FusedSGD = FusedOptimizer<torch::optim::SGD, torch::optim::SGDOptions>;

extern template class FusedOptimizer<torch::optim::AdamW,
                                     torch::optim::AdamWOptions>;
extern template class FusedOptimizer<torch::optim::Adam,
                                     torch::optim::AdamOptions>;
extern template class FusedOptimizer<torch::optim::SGD,
                                     torch::optim::SGDOptions>;

}  // namespace fsdp

#endif  // FSDP_OPTIM_FUSED_OPTIMIZER_H_
