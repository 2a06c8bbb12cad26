// Steps torch::optim's AdamW, Adam and SGD by torch's fused kernels, which are
// fused=True in Python. A model's shards lie next to each other, so that a step
// is one call at the speed of memory.
//
//   fsdp::FusedAdamW optimizer(model->Parameters(),
//                              torch::optim::AdamWOptions(3e-4));
//
// They can be used wherever torch::optim's optimizers can: with groups,
// schedulers, zero_grad(), MakeOptimizer(), and with state dicts and files,
// which both kinds read from each other. Results differ from torch::optim's in
// the last bits. They depend neither on the number of ranks nor on how
// parameters are grouped.
#ifndef FSDP_OPTIM_FUSED_OPTIMIZER_H_
#define FSDP_OPTIM_FUSED_OPTIMIZER_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/rank_activity.h"
#include "fsdp/resting/resting_places.h"
#include "ranges/tensor_range.h"

namespace fsdp {

// The interface of optimizers whose step can be captured
// (fsdp/capture/step_capture.h).
//
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

class FusedStepper;

// Options that torch::optim lacks. State dicts do not have them.
struct FusedOptions {
  bool maximize = false;  // goes up the gradient
  // The communicator's activity, which notes when step() runs; may be null.
  std::shared_ptr<comm::RankActivity> activity = nullptr;
};

// A fused form of `Base`, an optimizer of torch::optim that has `Options`. As
// with it, parameters without a gradient do not change. Gradients of another
// floating-point dtype than their parameter's are converted. States of
// parameters that share memory, such as those of a unit, share memory, too; the
// first step allocates it for all parameters that require grad. Not
// thread-safe.
template <typename Base, typename Options>
class FusedOptimizer final : public Base,
                             public RestingStates,
                             public CapturableOptimizer {
 public:
  using typename Base::LossClosure;

  // Throws StatusError, InvalidArgument: LibTorch refuses the defaults, such as
  // a negative learning rate.
  explicit FusedOptimizer(
      const std::vector<torch::optim::OptimizerParamGroup>& groups,
      const Options& defaults = Options(),
      const FusedOptions& fused = FusedOptions());
  explicit FusedOptimizer(std::vector<at::Tensor> parameters,
                          const Options& defaults = Options(),
                          const FusedOptions& fused = FusedOptions());
  FusedOptimizer(FusedOptimizer&&) noexcept;
  ~FusedOptimizer() override;

  // Throws StatusError; InvalidArgument, with nothing changed, if the kernels
  // cannot step a parameter: it or its gradient is sparse, it has gaps in
  // memory, or its dtype is not float, double, half or bfloat16.
  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  at::Tensor step(LossClosure closure = nullptr) override;

  // Steps the shards of one unit that have a gradient, and drops the gradients,
  // for StepInBackward(). Other units are not stepped; those in the same memory
  // are looked at. Errors are those of step().
  absl::Status StepUnit(absl::Span<const TensorRange> unit);

  // See resting_places.h; optimizer state dicts call this.
  absl::Status TakeUpStatesOf(absl::Span<const at::Tensor> parameters) override;

  // See CapturableOptimizer; CapturedStep calls them.
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

// The fused forms of torch::optim's optimizers of these names.
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
