// Compares steps that the simulator predicts with measured ones: a residual MLP
// is trained with the options that ChooseOptions() takes for it, which measures
// this machine right before. Counters, medians of the iterations:
// `predicted_ms`, `measured_ms`, and `predicted/measured`.
//   ./bazelw run -c opt //benchmarks:simulated_step_benchmark
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "benchmarks/sharded_mlp.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "planner/choose/choose_options.h"

namespace fsdp {
namespace {

struct StepSeconds {
  double predicted = 0;
  double measured = 0;
};

// Runs on all ranks at once. Measures the third step, which prefetches.
StepSeconds PredictAndMeasure(std::shared_ptr<comm::Communicator> ranks,
                              int64_t rows) {
  const auto net = std::make_shared<ResidualMlpImpl>();
  const at::Tensor x = at::randn({rows, ResidualMlpImpl::kDim});
  AutoOptions wanted;
  wanted.memory_bytes = int64_t{4} << 30;
  wanted.rows = rows;
  wanted.loss = [&](int64_t some) {
    const at::Tensor part = x.narrow(0, 0, some);
    return ReconstructionLoss(net->forward(part), part);
  };
  wanted.base.wrap_policy = WrapModules<ResidualBlockImpl>();
  wanted.may_recompute = false;
  const AutoChoice choice = ValueOrThrow(ChooseOptions(net, ranks, wanted));
  const auto step = StepOf(
      ValueOrThrow(FullyShard(net, std::move(ranks), choice.options)), rows);
  step();
  step();
  return {choice.step_seconds(), Seconds(step)};
}

void BM_Step(benchmark::State& state, const std::string& backend) {
  const int ranks = static_cast<int>(state.range(0));
  const Group group = MakeGroup(backend, ranks);
  std::vector<double> predicted, measured;
  for (auto _ : state) {
    std::vector<StepSeconds> seconds(ranks);
    OnAllRanks(ranks, [&](int rank) {
      seconds[rank] = PredictAndMeasure(group[rank], state.range(1));
    });
    predicted.push_back(seconds[0].predicted);
    measured.push_back(
        std::max_element(seconds.begin(), seconds.end(),
                         [](const StepSeconds& a, const StepSeconds& b) {
                           return a.measured < b.measured;
                         })
            ->measured);
    state.SetIterationTime(measured.back());
  }
  state.counters["predicted_ms"] = 1e3 * Median(predicted);
  state.counters["measured_ms"] = 1e3 * Median(measured);
  state.counters["predicted/measured"] = MedianRatio(predicted, measured);
}

// Few rows are mostly communication, many are mostly compute.
void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"ranks", "rows"})
      ->ArgsProduct({{1, 2, 4}, {16, 256}})
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Step, local, "local")->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Step, shared_memory, "shared_memory")->Apply(Shapes);
BENCHMARK_CAPTURE(BM_Step, gloo, "gloo")->Apply(Shapes);

}  // namespace
}  // namespace fsdp
