#include "benchmarks/gpu_optimizer_run.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "base/status_error.h"
#include "benchmarks/gpu_gpt.h"
#include "benchmarks/gpu_module.h"
#include "examples/gpt/model/model.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::benchmarks {
namespace {

using Model = FullyShardedDataParallel<GpuGptImpl>;

// Parameter, gradient and two states are read, all but the gradient written.
constexpr double kStepMoves = 7;
constexpr double kCopyMoves = 2;

// With the gradients of one backward, which lie as a training has them.
Model MakeModel(const gpt::GptConfig& config, at::ScalarType dtype,
                const Place& place) {
  Options options;
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  auto net = MakeOn(place, dtype, [&config] {
    return std::make_shared<GpuGptImpl>(config, /*checkpointing=*/false);
  });
  Model model =
      ValueOrThrow(FullyShard(std::move(net), LoopbackGroup(place), options));
  const CountingRows rows(config, /*batch=*/1, place.device);
  ThrowIfError(model->Backward(LossOf(model->forward(rows.tokens), rows)));
  return model;
}

int64_t NumElements(const Model& model) {
  int64_t numel = 0;
  for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
  return numel;
}

class OptimizerRun final : public TurnRun {
 public:
  OptimizerRun(const gpt::GptConfig& config, at::ScalarType dtype,
               const Place& place)
      : device_(place.device),
        model_(MakeModel(config, dtype, place)),
        optimizer_(model_->Parameters(), torch::optim::AdamWOptions(1e-5)),
        from_(at::ones({NumElements(model_)},
                       at::TensorOptions(place.device).dtype(dtype))),
        to_(at::empty_like(from_)) {
    optimizer_.step();
    to_.copy_(from_);
  }

  double Turn() override {
    const double step = Time(device_, [this] { optimizer_.step(); }).whole;
    const double copy = Time(device_, [this] { to_.copy_(from_); }).whole;
    seconds_.push_back(step);
    of_copy_.push_back((kStepMoves / step) / (kCopyMoves / copy));
    return step;
  }

  Figures GetFigures() const override {
    return {{"ms", 1e3 * Median(seconds_)}, {"of_copy", Median(of_copy_)}};
  }

 private:
  const c10::Device device_;
  Model model_;
  FusedAdamW optimizer_;
  const at::Tensor from_;
  const at::Tensor to_;
  std::vector<double> seconds_;
  std::vector<double> of_copy_;
};

}  // namespace

std::unique_ptr<TurnRun> MakeOptimizerRun(const gpt::GptConfig& model,
                                          at::ScalarType dtype,
                                          const Place& place) {
  return std::make_unique<OptimizerRun>(model, dtype, place);
}

}  // namespace fsdp::benchmarks
