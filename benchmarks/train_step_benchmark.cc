// Compares a training step of a residual MLP, sharded over two ranks that are
// threads, with the floor of two independent plain models (each rank does all
// of the optimizer's work and does not communicate). `of_plan`: the most memory
// of gathered parameters and reduce buffers in use on a rank, over what the
// plan says; absent where no such memory is used. `sent_MB`: what a rank sends.
//   ./bazelw run -c opt //benchmarks:train_step_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/sharded_mlp.h"
#include "comm/communicator.h"
#include "comm/testing/recording_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp {
namespace {

constexpr int kRanks = 2;
using RankStep = std::function<void()>;

RankStep PlainStep(int64_t rows) {
  auto net = std::make_shared<ResidualMlpImpl>();
  auto optimizer = std::make_shared<FusedAdamW>(net->parameters());
  const at::Tensor x = at::randn({rows, ResidualMlpImpl::kDim});
  return [net, optimizer, x] {
    ReconstructionLoss(net->forward(x), x).backward();
    optimizer->step();
    optimizer->zero_grad();
  };
}

double SecondsPerStep(const std::vector<RankStep>& steps) {
  return Seconds(
      [&steps] { OnAllRanks(kRanks, [&](int rank) { steps[rank](); }); });
}

double OfPlan(const ShardedMlp& model) {
  const MemoryStats stats = model->memory_stats();
  const MemoryPlan plan = model->PlanMemory();
  return static_cast<double>(stats.parameters.peak_in_use_bytes +
                             stats.gradients.peak_in_use_bytes) /
         static_cast<double>(plan.gathered + plan.in_flight);
}

// Alternates the floor with the sharded step, so that both see the same noise.
void BM_Step(benchmark::State& state, const std::string& backend,
             bool quantize = false) {
  const int64_t rows = state.range(0);
  comm::CollectiveLog log;
  const Group group = MakeGroup(backend, kRanks, &log);
  Options options;
  options.quantize.gather = options.quantize.reduce = quantize;
  std::vector<RankStep> sharded(kRanks);
  std::vector<RankStep> plain(kRanks);
  std::vector<ShardedMlp> models(kRanks, nullptr);
  OnAllRanks(kRanks, [&](int rank) {
    models[rank] = ShardMlp(group[rank], options);
    sharded[rank] = StepOf(models[rank], rows);
  });
  for (RankStep& step : plain) step = PlainStep(rows);
  SecondsPerStep(sharded);
  SecondsPerStep(plain);
  log.Clear();
  double sharded_seconds = 0;
  double plain_seconds = 0;
  int64_t steps = 0;
  for (auto _ : state) {
    const double seconds = SecondsPerStep(sharded);
    state.SetIterationTime(seconds);
    sharded_seconds += seconds;
    plain_seconds += SecondsPerStep(plain);
    ++steps;
  }
  const auto per_rank_step = [&](comm::Collective collective) {
    return static_cast<double>(log.TotalsOf(collective).bytes) /
           static_cast<double>(steps * kRanks);
  };
  state.counters["ms"] = 1e3 * sharded_seconds / static_cast<double>(steps);
  state.counters["floor_ms"] = 1e3 * plain_seconds / static_cast<double>(steps);
  state.counters["ratio_to_floor"] = sharded_seconds / plain_seconds;
  const double gathered = per_rank_step(comm::Collective::kAllGather);
  // Quantized sums are all-to-alls.
  const double reduced = per_rank_step(comm::Collective::kReduceScatter) +
                         per_rank_step(comm::Collective::kAllToAll);
  state.counters["gathered_MB"] = gathered / 1e6;
  state.counters["reduced_MB"] = reduced / 1e6;
  state.counters["sent_MB"] =
      (gathered + reduced) * (kRanks - 1) / kRanks / 1e6;
  state.counters["of_plan"] = OfPlan(models[0]);
  state.counters["rows_per_s"] = benchmark::Counter(
      static_cast<double>(rows * kRanks * steps), benchmark::Counter::kIsRate);
}

void Rows(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(16)->Arg(256)->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Step, local, "local")->Apply(Rows);
BENCHMARK_CAPTURE(BM_Step, shared_memory, "shared_memory")->Apply(Rows);
BENCHMARK_CAPTURE(BM_Step, gloo, "gloo")->Apply(Rows);
BENCHMARK_CAPTURE(BM_Step, gloo_int8, "gloo", true)->Apply(Rows);

}  // namespace
}  // namespace fsdp
