#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/gpu_run.h"
#include "benchmarks/measure.h"
#include "comm/host/available_memory.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {
namespace {

using Model = FullyShardedDataParallel<gpt::GptImpl>;

constexpr int kWarmUp = 2;

// Refuses before the machine ends the program for taking too much memory.
absl::Status CheckHostMemory(const torch::nn::Module& net,
                             const OffloadOptions& offload) {
  const int copies = (offload.parameters == Tier::kCpu ? 1 : 0) +
                     (offload.gradients == Tier::kCpu ? 1 : 0) +
                     (offload.optimizer == Tier::kCpu ? 2 : 0);
  int64_t bytes = 0;
  for (const at::Tensor& parameter : net.parameters()) {
    bytes += copies * static_cast<int64_t>(parameter.nbytes());
  }
  const int64_t available = comm::AvailableMemory();
  if (bytes < available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "what rests in the host's memory takes ", bytes >> 20, " MiB, and ",
      available >> 20, " are free. Try a smaller --large_layers"));
}

Model MakeModel(const ShardedStepCase& what, const Place& place) {
  Options options;
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  if (what.recompute) options.recompute.units = options.wrap_policy;
  options.recompute.options.preserve_rng_state = false;
  options.unit.precision.param_dtype = at::kBFloat16;
  options.unit.precision.reduce_dtype = at::kFloat;
  options.offload = what.offload;
  auto net = MakeOn(place, at::kFloat, [&what] {
    return std::make_shared<gpt::GptImpl>(what.model, /*checkpointing=*/false);
  });
  ThrowIfError(CheckHostMemory(*net, what.offload));
  return ValueOrThrow(
      FullyShard(std::move(net), LoopbackGroup(place), options));
}

int64_t NumParameters(const Model& model) {
  int64_t numel = 0;
  for (const TensorRange& named : model->Ranges()) {
    numel += c10::multiply_integers(named.sizes);
  }
  return numel;
}

class ShardedStepRun final : public TurnRun {
 public:
  ShardedStepRun(const ShardedStepCase& what, const Place& place)
      : what_(what),
        place_(place),
        memory_(place.device),
        before_(memory_.allocated()),
        rows_(what.model, what.batch, place.device),
        model_(MakeModel(what, place)),
        optimizer_(model_->Parameters(), torch::optim::AdamWOptions(1e-5)) {
    for (int i = 0; i < kWarmUp; ++i) {
      memory_.ResetPeak();
      ShardedStepRun::Turn();
    }
    peak_bytes_ = memory_.peak() - before_;
    seconds_.clear();
    optimizer_seconds_.clear();
  }

  double Turn() override {
    double seconds = 0;
    if (what_.offload.any()) {
      // The optimizer is timed apart: it takes so long that a wait is nothing.
      const double backward = Time(place_.device, [this] { Backward(); }).whole;
      optimizer_seconds_.push_back(
          Time(place_.device, [this] { Step(); }).whole);
      seconds = backward + optimizer_seconds_.back();
    } else {
      seconds = Time(place_.device, [this] {
                  Backward();
                  Step();
                }).whole;
    }
    seconds_.push_back(seconds);
    return seconds;
  }

  Figures GetFigures() const override {
    const double seconds = Median(seconds_);
    const double tokens = static_cast<double>(
        rows_.tokens.numel() * what_.micro_batches * place_.ranks);
    const auto parameters = static_cast<double>(NumParameters(model_));
    Figures figures = {
        {"ms", 1e3 * seconds},
        {"tokens_per_s", tokens / seconds},
        {"tokens_per_step", tokens},
        {"TFLOPS", 6 * parameters * tokens / seconds / 1e12},
        {"parameters", parameters / 1e9},
        {"first_loss", LossAt(0)},
        {"last_loss", LossAt(losses_.size() - 1)},
    };
    if (what_.offload.any()) {
      figures["optimizer_ms"] = 1e3 * Median(optimizer_seconds_);
    }
    if (memory_.known()) {
      figures["peak_MB"] = static_cast<double>(peak_bytes_) / 1e6;
    }
    return figures;
  }

 private:
  void Backward() {
    for (int i = 0; i < what_.micro_batches; ++i) {
      const at::Tensor loss = LossOf(model_->forward(rows_.tokens), rows_);
      ThrowIfError(model_->Backward(
          what_.micro_batches > 1 ? loss / what_.micro_batches : loss));
      if (i == 0) losses_.push_back(loss.detach());
    }
  }

  void Step() {
    if (what_.clip > 0) ValueOrThrow(model_->ClipGradNorm(what_.clip));
    optimizer_.step();
    optimizer_.zero_grad();
  }

  double LossAt(size_t step) const {
    const auto loss = losses_[step].item<double>();
    // Ranks that this process only plays do not train.
    if (place_.ranks == 1 && !std::isfinite(loss)) {
      throw StatusError(absl::InternalError(
          absl::StrCat("step ", step, ": the loss is ", loss,
                       ". The time of a broken training tells nothing")));
    }
    return loss;
  }

  const ShardedStepCase what_;
  const Place place_;
  const DeviceMemory memory_;
  const int64_t before_;
  const CountingRows rows_;
  Model model_;
  FusedAdamW optimizer_;
  int64_t peak_bytes_ = 0;
  std::vector<double> seconds_;
  std::vector<double> optimizer_seconds_;
  std::vector<at::Tensor> losses_;  // of each step's first backward
};

}  // namespace

std::unique_ptr<TurnRun> MakeShardedStepRun(const ShardedStepCase& what,
                                            const Place& place) {
  return std::make_unique<ShardedStepRun>(what, place);
}

}  // namespace fsdp::benchmarks
