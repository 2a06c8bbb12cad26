// Measures what it costs that every operator is seen (fsdp/transparent): small
// operators with and without it, in the same forward of one rank, in turns.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp {
namespace {

constexpr int64_t kDim = 16;

// Has two units and a forward that runs what it is told.
class Net : public torch::nn::Module {
 public:
  using Run = std::function<void(Net&, const at::Tensor& x)>;
  Net()
      : first(register_module("first", torch::nn::Linear(kDim, kDim))),
        second(register_module("second", torch::nn::Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    run(*this, x);
    return x;
  }
  torch::nn::Linear first, second;
  Run run;
};

using Model = FullyShardedDataParallel<Net>;

Model ShardNet() {
  Options options;
  options.transparent = true;
  options.wrap_policy = WrapModules<torch::nn::LinearImpl>();
  std::shared_ptr<comm::Communicator> rank =
      std::move(ValueOrThrow(comm::CreateLocalGroup(1)).front());
  return ValueOrThrow(
      FullyShard(std::make_shared<Net>(), std::move(rank), options));
}

// `batch` runs `kOperators` operators a user would call.
constexpr int kOperators = 2000;

void Compare(benchmark::State& state, bool with_grad, const Net::Run& batch) {
  Model model = ShardNet();
  const c10::AutoGradMode grad(with_grad);
  const at::Tensor x = at::ones({1, kDim});
  double seen = 0, unseen = 0;  // seconds
  model->module()->run = [&](Net& net, const at::Tensor& input) {
    // The first batch gathers the unit and warms the caches for both.
    batch(net, input);
    seen += Seconds([&] { batch(net, input); });
    const at::DisableRecordFunctionGuard guard;
    unseen += Seconds([&] { batch(net, input); });
  };
  for (auto _ : state) model->forward(x);
  const double each =
      1e9 / (static_cast<double>(state.iterations()) * kOperators);
  state.counters["ns_unseen"] = unseen * each;
  state.counters["ns_seen"] = seen * each;
  state.counters["ns_more"] = (seen - unseen) * each;
  state.counters["ratio"] = seen / unseen;
}

void BM_AddOfOtherTensors(benchmark::State& state) {
  Compare(state, /*with_grad=*/false, [](Net&, const at::Tensor& x) {
    for (int i = 0; i < kOperators; ++i) benchmark::DoNotOptimize(x.add(x));
  });
}
BENCHMARK(BM_AddOfOtherTensors)->Unit(benchmark::kMillisecond);

// Each call looks up parameters of the unit and runs two operators inside.
void LinearOfAUnit(benchmark::State& state, bool with_grad) {
  Compare(state, with_grad, [](Net& net, const at::Tensor& x) {
    for (int i = 0; i < kOperators; ++i) {
      benchmark::DoNotOptimize(net.first->forward(x));
    }
  });
}
BENCHMARK_CAPTURE(LinearOfAUnit, NoGrad, false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(LinearOfAUnit, Grad, true)->Unit(benchmark::kMillisecond);

// Each operator begins a unit's forward: the figure is all that one rank does
// to gather, hand over and free.
void BM_UnitsInTurns(benchmark::State& state) {
  Model model = ShardNet();
  const c10::NoGradGuard no_grad;
  constexpr int kUses = 200;
  model->module()->run = [](Net& net, const at::Tensor& x) {
    for (int i = 0; i < kUses / 2; ++i) {
      benchmark::DoNotOptimize(net.first->forward(x));
      benchmark::DoNotOptimize(net.second->forward(x));
    }
  };
  const at::Tensor x = at::ones({1, kDim});
  for (auto _ : state) model->forward(x);
  state.counters["uses"] = benchmark::Counter(
      static_cast<double>(state.iterations()) * kUses,
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_UnitsInTurns)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp
