// What rests in the host's memory, the optimizer alone, and collectives.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "benchmarks/chain.h"
#include "benchmarks/gpu_benchmarks.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {
namespace {

Contender PairsContender(const OffloadCase& what, const Place& place,
                         const OffloadOptions& offload) {
  return Contender(place.device, /*warm_up=*/2, [&]() -> Repeated {
    auto net = MakeOn(place, what.dtype, [&what] {
      return std::make_shared<PairsImpl>(what.units, what.dim);
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

Repeated NoLoss(std::function<void()> call, int repeats = 1) {
  Repeated repeated;
  repeated.run = [call = std::move(call)] {
    call();
    return at::Tensor();
  };
  repeated.repeats = repeats;
  return repeated;
}

}  // namespace

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
        {"resident_ms", 1e3 * Median(resident.whole)},
        {"optimizer_ms", 1e3 * Median(away.then)},
        {"of_resident", MedianRatio(resident.whole, away.whole)},
        {"optimizer_of_resident", MedianRatio(resident.then, away.then)},
        {"loss_difference", LossDifference("offloaded", away.losses, "resident",
                                           resident.losses, what.dtype)},
    };
    if (what.step_on != StepOn::kFaster) {
      figures["GB/s"] = MovedBytes(what) / Median(away.whole) / 1e9;
    }
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
  const auto optimizer = std::make_shared<FusedAdamW>(
      model->Parameters(), torch::optim::AdamWOptions(1e-5));
  int64_t numel = 0;
  for (const at::Tensor& shard : model->Parameters()) numel += shard.numel();
  const at::Tensor from =
      at::ones({numel}, at::TensorOptions(place.device).dtype(dtype));
  const at::Tensor to = at::empty_like(from);
  const auto step = [model, optimizer] { optimizer->step(); };
  const auto copy = [from, to] { to.copy_(from); };
  const auto figures_of = [](const TurnRun::Contenders& contenders) {
    // A step reads parameter, gradient, two states; writes all but the
    // gradient. A copy reads one and writes one.
    constexpr double kMoves = 7.0 / 2;
    return Figures{{"ms", 1e3 * Median(contenders[0].whole)},
                   {"of_copy", kMoves * MedianRatio(contenders[1].whole,
                                                    contenders[0].whole)}};
  };
  return std::make_unique<TurnRun>(
      TurnRun::Contenders{
          Contender(place.device, /*warm_up=*/1, [&] { return NoLoss(step); }),
          Contender(place.device, /*warm_up=*/1, [&] { return NoLoss(copy); })},
      figures_of);
}

std::unique_ptr<TurnRun> MakeCollectiveRun(
    comm::Collective collective, int64_t bytes, c10::Device device,
    std::shared_ptr<comm::Communicator> group) {
  // In a row, so that the device never waits for the host.
  constexpr int kCalls = 10;
  // Memory that the group reaches best.
  const auto floats = [&group](int64_t size) {
    FSDP_CHECK(size % static_cast<int64_t>(sizeof(float)) == 0);
    return ValueOrThrow(group->AllocateSymmetric(size))
        .view(at::kFloat)
        .fill_(1);
  };
  FSDP_CHECK(bytes % group->world_size() == 0);
  const at::Tensor whole = floats(bytes);
  const at::Tensor part = floats(bytes / group->world_size());
  const at::Tensor to = at::empty_like(whole);
  const auto call = [=] {
    const auto work =
        ValueOrThrow(collective == comm::Collective::kAllGather
                         ? group->AllGather(whole, part, "benchmark")
                         : group->ReduceScatter(
                               part, whole, comm::ReduceOp::kSum, "benchmark"));
    ThrowIfError(work->BlockCurrentStream());
  };
  const auto copy = [to, whole] { to.copy_(whole); };
  const auto figures_of = [bytes](const TurnRun::Contenders& contenders) {
    const std::vector<double>& calls = contenders[0].whole;
    return Figures{{"GB/s", static_cast<double>(bytes) / Median(calls) / 1e9},
                   {"of_copy", MedianRatio(contenders[1].whole, calls)}};
  };
  return std::make_unique<TurnRun>(
      TurnRun::Contenders{
          Contender(device, 1, [&] { return NoLoss(call, kCalls); }),
          Contender(device, 1, [&] { return NoLoss(copy, kCalls); })},
      figures_of);
}

}  // namespace fsdp::benchmarks
