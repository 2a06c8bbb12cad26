// Measures what is decided and seen on the host: what one training step
// asks of the schedule (BM_TrainingStep), laying out a unit's parameters
// (BM_Create), and what it costs that every operator is seen (fsdp/transparent,
// BM_Seen): small operators with and without it, in the same forward of one
// rank, in turns.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "flat_param/layout.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
namespace {

// Makes a root and `count` - 1 units in it.
Schedule MakeSchedule(int count) {
  std::vector<ScheduledUnit> units = {
      {"root", /*parent=*/-1, /*reshard_after_forward=*/false}};
  for (int i = 1; i < count; ++i) {
    units.push_back({absl::StrCat("blocks.", i), /*parent=*/0});
  }
  return Schedule(std::move(units), ScheduleOptions());
}

// Returns forward and backward of all units, the root around the others.
std::vector<Event> TrainingStep(int count) {
  std::vector<Event> events;
  const auto add = [&events](EventKind kind, int unit) {
    Event& event = events.emplace_back();
    event.kind = kind;
    event.unit = unit;
    event.records_graph = kind == EventKind::kPreForward;
    event.expects_backward = kind == EventKind::kPostForward;
    event.reduces = kind == EventKind::kPostBackward;
  };
  add(EventKind::kPreForward, 0);
  for (int unit = 1; unit < count; ++unit) {
    add(EventKind::kPreForward, unit);
    add(EventKind::kPostForward, unit);
  }
  add(EventKind::kPostForward, 0);
  add(EventKind::kPreBackward, 0);
  for (int unit = count - 1; unit > 0; --unit) {
    add(EventKind::kPreBackward, unit);
    add(EventKind::kPostBackward, unit);
  }
  add(EventKind::kPostBackward, 0);
  events.push_back({EventKind::kEndOfBackward});
  return events;
}

void Run(Schedule& schedule, const std::vector<Event>& events) {
  for (const Event& event : events) {
    absl::StatusOr<Actions> actions = schedule.Next(event);
    FSDP_CHECK(actions.ok());
    benchmark::DoNotOptimize(actions);
  }
}

void BM_TrainingStep(benchmark::State& state) {
  const int count = static_cast<int>(state.range(0));
  Schedule schedule = MakeSchedule(count);
  const std::vector<Event> events = TrainingStep(count);
  Run(schedule, events);  // makes it know the order of the forward
  for (auto _ : state) Run(schedule, events);
  // The unit is printed with a prefix: "90n" are nanoseconds.
  state.counters["s/unit"] =
      benchmark::Counter(count, benchmark::Counter::kIsIterationInvariantRate |
                                    benchmark::Counter::kInvert);
}
BENCHMARK(BM_TrainingStep)->Arg(10)->Arg(100)->Arg(1000);

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

void BM_SeenAddOfOtherTensors(benchmark::State& state) {
  Compare(state, /*with_grad=*/false, [](Net&, const at::Tensor& x) {
    for (int i = 0; i < kOperators; ++i) benchmark::DoNotOptimize(x.add(x));
  });
}
BENCHMARK(BM_SeenAddOfOtherTensors)->Unit(benchmark::kMillisecond);

// Each call looks up parameters of the unit and runs two operators inside.
void BM_SeenLinear(benchmark::State& state, bool with_grad) {
  Compare(state, with_grad, [](Net& net, const at::Tensor& x) {
    for (int i = 0; i < kOperators; ++i) {
      benchmark::DoNotOptimize(net.first->forward(x));
    }
  });
}
BENCHMARK_CAPTURE(BM_SeenLinear, NoGrad, false)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_SeenLinear, Grad, true)->Unit(benchmark::kMillisecond);

// Each operator begins a unit's forward: the figure is all that one rank does
// to gather, hand over and free.
void BM_SeenUnitsInTurns(benchmark::State& state) {
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
BENCHMARK(BM_SeenUnitsInTurns)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp

namespace fsdp::flat_param {
namespace {

constexpr int kWorldSize = 8;
constexpr int64_t kElementSize = 4;

// Returns matrices and vectors in turn, as in a transformer block.
std::vector<ParameterSpec> Parameters(int64_t count) {
  std::vector<ParameterSpec> parameters;
  parameters.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    std::string name = absl::StrCat("blocks.", i / 12, ".parameter.", i % 12);
    if (i % 2 == 0) {
      parameters.push_back({std::move(name), {512, 511}, {511, 1}});
    } else {
      parameters.push_back({std::move(name), {511}, {1}});
    }
  }
  return parameters;
}

// Includes the copy of the parameters' descriptions that the layout keeps.
void BM_Create(benchmark::State& state) {
  const std::vector<ParameterSpec> parameters = Parameters(state.range(0));
  for (auto _ : state) {
    absl::StatusOr<FlatLayout> layout =
        FlatLayout::Create(parameters, kElementSize, kWorldSize);
    benchmark::DoNotOptimize(layout);
  }
  state.counters["parameters/s"] =
      benchmark::Counter(static_cast<double>(state.range(0)),
                         benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Create)->Arg(12)->Arg(1'000)->Arg(50'000);

}  // namespace
}  // namespace fsdp::flat_param
