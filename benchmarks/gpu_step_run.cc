// Training steps of a GPT.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/util/accumulate.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/device_graph.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"
#include "comm/host/available_memory.h"
#include "fsdp/capture/step_capture.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {
namespace {

using Model = FullyShardedDataParallel<gpt::GptImpl>;

// A captured step is captured and replayed in its last two warm-up steps.
int WarmUpOf(const TrainStepCase& what) {
  return what.make_graph == nullptr ? 2 : CaptureOptions().warm_up_steps + 2;
}

std::shared_ptr<gpt::GptImpl> MakeModel(const TrainStepCase& what,
                                        const Place& place) {
  return MakeOn(place, what.dtype, [&what] {
    return std::make_shared<gpt::GptImpl>(what.model, what.checkpointing);
  });
}

// Steps are small: where a loss is next to nothing or steps are large, two
// trainings differ by the last bits, which kernels add up in any order.
torch::optim::AdamWOptions SmallSteps() {
  return torch::optim::AdamWOptions(1e-5);
}

// Trains one of the two and keeps what was measured. The step gives its loss.
class Contender {
 public:
  // Runs the step that `make` returns until it is warm.
  Contender(c10::Device device, int warm_up,
            const std::function<std::function<at::Tensor()>()>& make)
      : device_(device) {
    // Makes what a thread's first matrix product allocates for all that follow.
    const at::Tensor matrix =
        at::ones({64, 64}, at::TensorOptions(device)).requires_grad_();
    matrix.mm(matrix).sum().backward();
    const DeviceMemory memory(device);
    const int64_t before = memory.allocated();
    step_ = make();
    for (int i = 0; i < warm_up; ++i) {
      memory.ResetPeak();
      losses_.push_back(step_());
    }
    Synchronize(device);
    resident_bytes_ = memory.allocated() - before;
    peak_bytes_ = memory.peak() - before;
  }

  void Run() {
    times_.push_back(
        Time(device_, [this] { losses_.push_back(step_().detach()); }));
  }

  const std::vector<CallTime>& times() const { return times_; }
  const std::vector<at::Tensor>& losses() const { return losses_; }
  int64_t resident_bytes() const { return resident_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  const c10::Device device_;
  std::function<at::Tensor()> step_;
  std::vector<CallTime> times_;
  std::vector<at::Tensor> losses_;  // of the warm-up, too
  int64_t resident_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// The step leaves its gradients, which the plan counts.
std::function<at::Tensor()> PlainStep(const TrainStepCase& what,
                                      const Place& place,
                                      const CountingRows& rows) {
  const auto model = MakeModel(what, place);
  ThrowIfError(Materialize(*model));
  const auto optimizer =
      std::make_shared<FusedAdamW>(model->parameters(), SmallSteps());
  return [model, optimizer, rows] {
    optimizer->zero_grad();
    const at::Tensor loss = LossOf(model->forward(rows.tokens), rows);
    loss.backward();
    optimizer->step();
    return loss.detach();
  };
}

std::function<at::Tensor()> ShardedStep(Model model, const CountingRows& rows) {
  const auto optimizer =
      std::make_shared<FusedAdamW>(model->Parameters(), SmallSteps());
  return [model, optimizer, rows]() mutable {
    optimizer->zero_grad();
    const at::Tensor loss = LossOf(model->forward(rows.tokens), rows);
    ThrowIfError(model->Backward(loss));
    optimizer->step();
    return loss.detach();
  };
}

std::function<at::Tensor()> CapturedShardedStep(Model model,
                                                const CountingRows& rows,
                                                DeviceGraphMaker make_graph) {
  const auto optimizer =
      std::make_shared<FusedAdamW>(model->Parameters(), SmallSteps());
  CaptureOptions options;
  options.make_graph = std::move(make_graph);
  const std::shared_ptr<CapturedStep> step = ValueOrThrow(CapturedStep::Make(
      *model, *optimizer,
      [model, optimizer, rows](const CapturedStep::Inputs& /*none*/) mutable
      -> absl::StatusOr<at::Tensor> {
        at::Tensor loss = LossOf(model->forward(rows.tokens), rows);
        FSDP_RETURN_IF_ERROR(model->Backward(loss));
        optimizer->step();
        optimizer->zero_grad();
        return loss;
      },
      options));
  return
      [model, optimizer, step] { return ValueOrThrow(step->Run({})).clone(); };
}

Model Shard(std::shared_ptr<gpt::GptImpl> model, const Place& place) {
  Options options;
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  return ValueOrThrow(
      FullyShard(std::move(model), LoopbackGroup(place), options));
}

std::vector<double> TimesOf(const Contender& of, double CallTime::*part) {
  std::vector<double> values;
  for (const CallTime& time : of.times()) values.push_back(time.*part);
  return values;
}

class TrainStepRun final : public TurnRun {
 public:
  TrainStepRun(const TrainStepCase& what, const Place& place)
      : what_(what),
        place_(place),
        rows_(what.model, what.batch, place.device),
        ours_(place.device, WarmUpOf(what),
              [this] {
                model_ = Shard(MakeModel(what_, place_), place_);
                return what_.make_graph == nullptr
                           ? ShardedStep(model_, rows_)
                           : CapturedShardedStep(model_, rows_,
                                                 what_.make_graph);
              }),
        plain_(place.device, WarmUpOf(what),
               [this] { return PlainStep(what_, place_, rows_); }) {}

  double Turn() override {
    ours_.Run();
    plain_.Run();
    return ours_.times().back().whole;
  }

  Figures GetFigures() const override {
    Figures figures;
    AddTimes(figures);
    AddMemory(figures);
    // Ranks that this process only plays do not train.
    // Factors of matrix products lie elsewhere, which may cost the last bits.
    if (place_.ranks == 1) {
      figures["loss_difference"] = LossDifference(
          "sharded", ours_.losses(), "plain", plain_.losses(), what_.dtype);
    }
    return figures;
  }

 private:
  void AddTimes(Figures& figures) const {
    const std::vector<double> ours = TimesOf(ours_, &CallTime::whole);
    const std::vector<double> plain = TimesOf(plain_, &CallTime::whole);
    const int units = model_->sharded_model().num_units();
    const double host = Median(TimesOf(ours_, &CallTime::host));
    const double plain_host = Median(TimesOf(plain_, &CallTime::host));
    const double whole = Median(ours);
    figures["ms"] = 1e3 * whole;
    figures["plain_ms"] = 1e3 * Median(plain);
    figures["of_plain"] = MedianRatio(ours, plain);
    figures["host_us_per_unit"] = 1e6 * host / units;
    figures["added_us_per_unit"] = 1e6 * (host - plain_host) / units;
    figures["tokens_per_s"] =
        static_cast<double>(rows_.tokens.numel() * place_.ranks) / whole;
  }

  void AddMemory(Figures& figures) const {
    const MemoryStats stats = model_->memory_stats();
    const MemoryPlan plan = model_->PlanMemory();
    if (plan.gathered + plan.in_flight > 0) {
      figures["of_plan"] =
          static_cast<double>(stats.parameters.peak_in_use_bytes +
                              stats.gradients.peak_in_use_bytes) /
          static_cast<double>(plan.gathered + plan.in_flight);
    }
    if (!DeviceMemory(place_.device).known()) return;
    figures["reserved_of_plan"] = static_cast<double>(ours_.resident_bytes()) /
                                  static_cast<double>(plan.total());
    figures["peak_MB"] = static_cast<double>(ours_.peak_bytes()) / 1e6;
    figures["plain_peak_MB"] = static_cast<double>(plain_.peak_bytes()) / 1e6;
  }

  const TrainStepCase what_;
  const Place place_;
  const CountingRows rows_;
  Model model_ = nullptr;
  Contender ours_;
  Contender plain_;
};

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
    double parameters = 0;
    for (const TensorRange& named : model_->Ranges()) {
      parameters += static_cast<double>(c10::multiply_integers(named.sizes));
    }
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

std::unique_ptr<TurnRun> MakeTrainStepRun(const TrainStepCase& what,
                                          const Place& place) {
  return std::make_unique<TrainStepRun>(what, place);
}

std::unique_ptr<TurnRun> MakeShardedStepRun(const ShardedStepCase& what,
                                            const Place& place) {
  return std::make_unique<ShardedStepRun>(what, place);
}

}  // namespace fsdp::benchmarks
