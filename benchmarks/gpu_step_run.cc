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

// Steps are small: where a loss is next to nothing or steps are large, two
// trainings differ by the last bits, which kernels add up in any order.
std::shared_ptr<FusedAdamW> OptimizerOf(std::vector<at::Tensor> parameters) {
  return std::make_shared<FusedAdamW>(std::move(parameters),
                                      torch::optim::AdamWOptions(1e-5));
}

// The step leaves its gradients, which the plan counts. `backward` gets the
// loss.
template <typename Model, typename Backward>
Repeated StepOf(Model model, std::vector<at::Tensor> parameters,
                const CountingRows& rows, Backward backward) {
  const auto optimizer = OptimizerOf(std::move(parameters));
  return {[model, optimizer, rows, backward]() mutable {
    optimizer->zero_grad();
    const at::Tensor loss = LossOf(model->forward(rows.tokens), rows);
    backward(model, loss);
    optimizer->step();
    return loss.detach();
  }};
}

Repeated PlainStep(const TrainStepCase& what, const Place& place,
                   const CountingRows& rows) {
  const auto model = MakeGpt(what.model, place, what.dtype, what.checkpointing);
  ThrowIfError(Materialize(*model));
  return StepOf(model, model->parameters(), rows,
                [](auto&, const at::Tensor& loss) { loss.backward(); });
}

Repeated ShardedStep(const Gpt& model, const CountingRows& rows) {
  return StepOf(model, model->Parameters(), rows,
                [](Gpt& sharded, const at::Tensor& loss) {
                  ThrowIfError(sharded->Backward(loss));
                });
}

Repeated CapturedShardedStep(Gpt model, const CountingRows& rows,
                             DeviceGraphMaker make_graph) {
  const auto optimizer = OptimizerOf(model->Parameters());
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
  return {[model, optimizer, step] {
    return ValueOrThrow(step->Run({})).clone().detach();
  }};
}

Figures FiguresOf(const TurnRun::Contenders& contenders, const Gpt& model,
                  const TrainStepCase& what, int ranks) {
  const Contender& ours = contenders[0];
  const Contender& plain = contenders[1];
  const int units = model->sharded_model().num_units();
  const double host = Median(ours.host);
  const double whole = Median(ours.whole);
  Figures figures = {
      {"ms", 1e3 * whole},
      {"plain_ms", 1e3 * Median(plain.whole)},
      {"of_plain", MedianRatio(ours.whole, plain.whole)},
      {"host_us_per_unit", 1e6 * host / units},
      {"added_us_per_unit", 1e6 * (host - Median(plain.host)) / units},
      {"tokens_per_s",
       static_cast<double>(what.batch * what.model.seq * ranks) / whole},
  };
  const MemoryStats stats = model->memory_stats();
  const MemoryPlan plan = model->PlanMemory();
  if (plan.gathered + plan.in_flight > 0) {
    figures["of_plan"] =
        static_cast<double>(stats.parameters.peak_in_use_bytes +
                            stats.gradients.peak_in_use_bytes) /
        static_cast<double>(plan.gathered + plan.in_flight);
  }
  if (ours.counts_memory) {
    figures["reserved_of_plan"] = static_cast<double>(ours.resident_bytes) /
                                  static_cast<double>(plan.total());
    figures["peak_MB"] = static_cast<double>(ours.peak_bytes) / 1e6;
    figures["plain_peak_MB"] = static_cast<double>(plain.peak_bytes) / 1e6;
  }
  // Ranks that this process only plays do not train.
  // Factors of matrix products lie elsewhere, which may cost the last bits.
  if (ranks == 1) {
    figures["loss_difference"] = LossDifference("sharded", ours.losses, "plain",
                                                plain.losses, what.dtype);
  }
  return figures;
}

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

Gpt MakeModel(const ShardedStepCase& what, const Place& place) {
  Options options;
  if (what.recompute) options.recompute.units = WrapModules<gpt::BlockImpl>();
  options.recompute.options.preserve_rng_state = false;
  options.unit.precision.param_dtype = at::kBFloat16;
  options.unit.precision.reduce_dtype = at::kFloat;
  options.offload = what.offload;
  auto net = MakeGpt(what.model, place, at::kFloat);
  ThrowIfError(CheckHostMemory(*net, what.offload));
  return ShardGpt(std::move(net), place, options);
}

// The loss is that of the first backward.
Repeated ShardedStep(const ShardedStepCase& what, const Place& place,
                     Gpt model) {
  const CountingRows rows(what.model, what.batch, place.device);
  const auto optimizer = OptimizerOf(model->Parameters());
  auto backward = [what, rows, model]() mutable {
    at::Tensor first;
    for (int i = 0; i < what.micro_batches; ++i) {
      const at::Tensor loss = LossOf(model->forward(rows.tokens), rows);
      ThrowIfError(model->Backward(
          what.micro_batches > 1 ? loss / what.micro_batches : loss));
      if (i == 0) first = loss.detach();
    }
    return first;
  };
  auto step = [what, model, optimizer]() mutable {
    if (what.clip > 0) ValueOrThrow(model->ClipGradNorm(what.clip));
    optimizer->step();
    optimizer->zero_grad();
  };
  // The optimizer takes so long there that a wait is nothing.
  if (what.offload.any()) return {backward, step};
  return {[backward, step]() mutable {
    const at::Tensor loss = backward();
    step();
    return loss;
  }};
}

double LossAt(const std::vector<at::Tensor>& losses, size_t step, int ranks) {
  const auto loss = losses[step].item<double>();
  // Ranks that this process only plays do not train.
  if (ranks == 1 && !std::isfinite(loss)) {
    throw StatusError(absl::InternalError(
        absl::StrCat("step ", step, ": the loss is ", loss,
                     ". The time of a broken training tells nothing")));
  }
  return loss;
}

Figures FiguresOf(const Contender& ours, const Gpt& model,
                  const ShardedStepCase& what, int ranks) {
  const double seconds = Median(ours.whole);
  const auto tokens = static_cast<double>(what.batch * what.model.seq *
                                          what.micro_batches * ranks);
  double parameters = 0;
  for (const TensorRange& named : model->Ranges()) {
    parameters += static_cast<double>(c10::multiply_integers(named.sizes));
  }
  Figures figures = {
      {"ms", 1e3 * seconds},
      {"tokens_per_s", tokens / seconds},
      {"tokens_per_step", tokens},
      {"TFLOPS", 6 * parameters * tokens / seconds / 1e12},
      {"parameters", parameters / 1e9},
      {"first_loss", LossAt(ours.losses, 0, ranks)},
      {"last_loss", LossAt(ours.losses, ours.losses.size() - 1, ranks)},
  };
  if (!ours.then.empty()) figures["optimizer_ms"] = 1e3 * Median(ours.then);
  if (ours.counts_memory) {
    figures["peak_MB"] = static_cast<double>(ours.peak_bytes) / 1e6;
  }
  return figures;
}

}  // namespace

std::unique_ptr<TurnRun> MakeTrainStepRun(const TrainStepCase& what,
                                          const Place& place) {
  // Makes what a thread's first matrix product allocates for all that follow.
  const at::Tensor matrix =
      at::ones({64, 64}, at::TensorOptions(place.device)).requires_grad_();
  matrix.mm(matrix).sum().backward();
  const CountingRows rows(what.model, what.batch, place.device);
  const bool is_captured = what.make_graph != nullptr;
  // A captured step is captured and replayed in its last two warm-up steps.
  const int warm_up = is_captured ? CaptureOptions().warm_up_steps + 2 : 2;
  Gpt model = nullptr;
  TurnRun::Contenders contenders;
  contenders.emplace_back(place.device, warm_up, [&] {
    model = ShardGpt(MakeGpt(what.model, place, what.dtype, what.checkpointing),
                     place);
    return is_captured ? CapturedShardedStep(model, rows, what.make_graph)
                       : ShardedStep(model, rows);
  });
  contenders.emplace_back(place.device, warm_up,
                          [&] { return PlainStep(what, place, rows); });
  return std::make_unique<TurnRun>(
      std::move(contenders),
      [what, model, ranks = place.ranks](const TurnRun::Contenders& both) {
        return FiguresOf(both, model, what, ranks);
      });
}

std::unique_ptr<TurnRun> MakeShardedStepRun(const ShardedStepCase& what,
                                            const Place& place) {
  Gpt model = nullptr;
  TurnRun::Contenders contenders;
  contenders.emplace_back(place.device, /*warm_up=*/2, [&] {
    model = MakeModel(what, place);
    return ShardedStep(what, place, model);
  });
  return std::make_unique<TurnRun>(
      std::move(contenders),
      [what, model, ranks = place.ranks](const TurnRun::Contenders& alone) {
        return FiguresOf(alone.front(), model, what, ranks);
      });
}

}  // namespace fsdp::benchmarks
