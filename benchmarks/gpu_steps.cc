// The benchmarks: training steps of a GPT, what rests in the host's memory, and
// the optimizer alone.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/util/accumulate.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "benchmarks/chain.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"
#include "comm/host/shared_segment.h"
#include "comm/testing/loopback_communicator.h"
#include "fsdp/capture/step_capture.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp::benchmarks {
namespace {

// Returns rank 0 of as many ranks as `place` has, all played by this process.
std::shared_ptr<comm::Communicator> LoopbackGroup(const Place& place) {
  comm::LoopbackOptions options;
  options.place = {/*rank=*/0, place.ranks};
  options.device = place.device;
  options.prefers_scaled_inputs = true;  // as NCCL does
  return ValueOrThrow(comm::CreateLoopback(options));
}

// The data of a step: rows of numbers that count upwards, and the next of each.
struct CountingRows {
  CountingRows(const gpt::GptConfig& model, int64_t batch, c10::Device device) {
    const at::Tensor counts = at::arange(model.seq + 1, at::kLong);
    const at::Tensor starts = at::arange(batch, at::kLong) * 31;
    const at::Tensor rows =
        (starts.unsqueeze(1) + counts.unsqueeze(0)).remainder(model.vocab);
    tokens = rows.narrow(1, 0, model.seq).contiguous().to(device);
    targets = rows.narrow(1, 1, model.seq).contiguous().to(device);
  }

  at::Tensor tokens;   // [batch, model.seq]
  at::Tensor targets;  // likewise
};

// Returns the loss, computed in fp32.
at::Tensor LossOf(const at::Tensor& logits, const CountingRows& rows) {
  return gpt::NextTokenLoss(logits.to(at::kFloat), rows.targets);
}

using Gpt = FullyShardedDataParallel<gpt::GptImpl>;

std::shared_ptr<gpt::GptImpl> MakeGpt(const gpt::GptConfig& config,
                                      const Place& place, at::ScalarType dtype,
                                      bool checkpointing = false) {
  return MakeOn(place, dtype, [&] {
    return std::make_shared<gpt::GptImpl>(config, checkpointing);
  });
}

Gpt ShardGpt(std::shared_ptr<gpt::GptImpl> net, const Place& place,
             Options options = {}) {
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  return ValueOrThrow(
      FullyShard(std::move(net), LoopbackGroup(place), options));
}

// Returns the largest difference between losses of two trainings, relative to
// the second one's. Throws StatusError where trainings in `dtype` would not
// differ so much by rounding.
double LossDifference(const char* name, const std::vector<at::Tensor>& losses,
                      const char* other_name,
                      const std::vector<at::Tensor>& other,
                      at::ScalarType dtype) {
  const double tolerance = dtype == at::kFloat ? 1e-4 : 5e-2;
  double largest = 0;
  for (size_t i = 0; i < losses.size(); ++i) {
    const auto mine = losses[i].item<double>();
    const auto theirs = other[i].item<double>();
    const double difference = std::abs(mine - theirs) / std::abs(theirs);
    if (!(difference <= tolerance)) {
      throw StatusError(absl::InternalError(
          absl::StrCat("step ", i, ": the ", name, " model's loss is ", mine,
                       ", the ", other_name, " model's ", theirs,
                       ". Steps of different trainings are not compared")));
    }
    largest = std::max(largest, difference);
  }
  return largest;
}

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
    at::Tensor loss = backward();
    step();
    return loss;
  }};
}

double LossAt(const std::vector<at::Tensor>& losses, size_t step, int ranks) {
  auto loss = losses[step].item<double>();
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

Contender PairsContender(const OffloadCase& what, const Place& place,
                         const OffloadOptions& offload) {
  return Contender(place.device, /*warm_up=*/2, [&]() -> Repeated {
    auto net = MakeOn(place, what.dtype, [&what] {
      return MakeChain<PairImpl>(what.units, what.dim);
    });
    Options options;
    options.wrap_policy = WrapModules<PairImpl>();
    options.offload = offload;
    auto model =
        ValueOrThrow(FullyShard(std::move(net), LoopbackGroup(place), options));
    const auto optimizer = std::make_shared<FusedAdamW>(
        model->Parameters(), torch::optim::AdamWOptions(1e-4));
    const at::Tensor x = at::full({what.rows, what.dim}, 0.5,
                                  at::TensorOptions().dtype(what.dtype))
                             .to(place.device);
    return {[model, x]() mutable {
              const at::Tensor loss = model->forward(x).square().mean();
              ThrowIfError(model->Backward(loss));
              return loss.detach();
            },
            [optimizer] {
              optimizer->step();
              optimizer->zero_grad();
            }};
  });
}

// Parameters come for forward and for backward, and gradients go. A device that
// steps gets parameters, gradients and both states, and gives all but the
// gradients back.
double MovedBytes(const OffloadCase& what) {
  const int times = what.step_on == StepOn::kDevice ? 3 + 7 : 3;
  const int64_t numel = 2 * what.units * what.dim * what.dim;
  return static_cast<double>(
      times * numel * static_cast<int64_t>(c10::elementSize(what.dtype)));
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

std::unique_ptr<TurnRun> MakeOffloadRun(const OffloadCase& what,
                                        const Place& place) {
  FSDP_CHECK(!place.device.is_cpu());
  OffloadOptions in_host_memory;
  in_host_memory.parameters = in_host_memory.gradients =
      in_host_memory.optimizer = Tier::kCpu;
  in_host_memory.step_on = what.step_on;
  const auto figures_of = [what](const TurnRun::Contenders& contenders) {
    const Contender& away = contenders[0];
    const Contender& resident = contenders[1];
    Figures figures = {
        {"ms", 1e3 * Median(away.whole)},
        {"GB/s", MovedBytes(what) / Median(away.whole) / 1e9},
        {"resident_ms", 1e3 * Median(resident.whole)},
        {"optimizer_ms", 1e3 * Median(away.then)},
        {"of_resident", MedianRatio(resident.whole, away.whole)},
        {"optimizer_of_resident", MedianRatio(resident.then, away.then)},
        {"loss_difference", LossDifference("offloaded", away.losses, "resident",
                                           resident.losses, what.dtype)},
    };
    if (away.counts_memory) {
      figures["peak_MB"] = static_cast<double>(away.peak_bytes) / 1e6;
      figures["resident_peak_MB"] =
          static_cast<double>(resident.peak_bytes) / 1e6;
    }
    return figures;
  };
  return std::make_unique<TurnRun>(
      TurnRun::Contenders{PairsContender(what, place, in_host_memory),
                          PairsContender(what, place, OffloadOptions())},
      figures_of);
}

std::unique_ptr<TurnRun> MakeOptimizerRun(const gpt::GptConfig& config,
                                          at::ScalarType dtype,
                                          const Place& place) {
  Gpt model = ShardGpt(MakeGpt(config, place, dtype), place);
  // Gives it gradients, laid out as in a training.
  const CountingRows rows(config, /*batch=*/1, place.device);
  ThrowIfError(model->Backward(LossOf(model->forward(rows.tokens), rows)));
  const auto optimizer = OptimizerOf(model->Parameters());
  int64_t numel = 0;
  for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
  const at::Tensor from =
      at::ones({numel}, at::TensorOptions(place.device).dtype(dtype));
  const at::Tensor to = at::empty_like(from);
  const std::function<void()> step = [model, optimizer] { optimizer->step(); };
  const std::function<void()> copy = [from, to] { to.copy_(from); };
  TurnRun::Contenders contenders;
  for (const std::function<void()>& each : {step, copy}) {
    contenders.emplace_back(place.device, /*warm_up=*/1, [&]() -> Repeated {
      return {[each] {
        each();
        return at::Tensor();
      }};
    });
  }
  return std::make_unique<TurnRun>(
      std::move(contenders), [](const TurnRun::Contenders& both) {
        // A step reads parameter, gradient, two states; writes all but the
        // gradient. A copy reads one and writes one.
        constexpr double kMoves = 7.0 / 2;
        return Figures{
            {"ms", 1e3 * Median(both[0].whole)},
            {"of_copy", kMoves * MedianRatio(both[1].whole, both[0].whole)}};
      });
}

}  // namespace fsdp::benchmarks
