// Measures what is decided and noted on the host: what one training step asks
// of the schedule (BM_TrainingStep); laying out a unit's parameters and asking
// where they are (BM_Create, BM_Query); and what recording a trace costs, and
// what tracing costs when nobody records (BM_Span, BM_ScopeOfAnAction).
#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "flat_param/layout.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/trace/trace.h"

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

// A trace is recorded if the argument is not zero.
std::unique_ptr<Trace> TraceIf(bool records) {
  if (!records) return nullptr;
  return ValueOrThrow(Trace::Start({/*rank=*/0, /*capacity=*/1 << 12}));
}

void BM_Span(benchmark::State& state) {
  const std::unique_ptr<Trace> trace = TraceIf(state.range(0) != 0);
  for (auto _ : state) const TraceSpan span("data");
}
BENCHMARK(BM_Span)->Arg(0)->Arg(1);

// Announces actions as the runtime does.
void BM_ScopeOfAnAction(benchmark::State& state) {
  const std::unique_ptr<Trace> trace = TraceIf(state.range(0) != 0);
  const std::string unit = "blocks.11";
  for (auto _ : state) {
    RECORD_USER_SCOPE(absl::StrCat("fsdp::WaitGather(", unit, ")"));
  }
}
BENCHMARK(BM_ScopeOfAnAction)->Arg(0)->Arg(1);

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

void CountParameters(benchmark::State& state, int64_t per_iteration) {
  state.counters["parameters/s"] =
      benchmark::Counter(static_cast<double>(per_iteration),
                         benchmark::Counter::kIsIterationInvariantRate);
}

// Includes the copy of the parameters' descriptions that the layout keeps.
void BM_Create(benchmark::State& state) {
  const std::vector<ParameterSpec> parameters = Parameters(state.range(0));
  for (auto _ : state) {
    absl::StatusOr<FlatLayout> layout =
        FlatLayout::Create(parameters, kElementSize, kWorldSize);
    benchmark::DoNotOptimize(layout);
  }
  CountParameters(state, state.range(0));
}
BENCHMARK(BM_Create)->Arg(12)->Arg(1'000)->Arg(50'000);

// Asks what one rank asks about all its parameters.
void BM_Query(benchmark::State& state) {
  const FlatLayout layout = ValueOrThrow(
      FlatLayout::Create(Parameters(state.range(0)), kElementSize, kWorldSize));
  int rank = 0;
  for (auto _ : state) {
    for (int i = 0; i < layout.num_parameters(); ++i) {
      benchmark::DoNotOptimize(layout.InShard(i, rank));
      benchmark::DoNotOptimize(layout.InParameter(i, rank));
    }
    rank = (rank + 1) % kWorldSize;
  }
  CountParameters(state, state.range(0));
}
BENCHMARK(BM_Query)->Arg(12)->Arg(1'000)->Arg(50'000);

}  // namespace
}  // namespace fsdp::flat_param
