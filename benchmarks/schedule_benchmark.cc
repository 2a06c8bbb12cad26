// Measures the control plane: what one training step asks of the schedule.
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "benchmark/benchmark.h"
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
  const auto pre_forward = [](int unit) {
    Event event{EventKind::kPreForward, unit};
    event.records_graph = true;
    return event;
  };
  const auto post_forward = [](int unit) {
    Event event{EventKind::kPostForward, unit};
    event.expects_backward = true;
    return event;
  };
  const auto post_backward = [](int unit) {
    Event event{EventKind::kPostBackward, unit};
    event.reduces = true;
    return event;
  };
  std::vector<Event> events = {pre_forward(0)};
  for (int unit = 1; unit < count; ++unit) {
    events.push_back(pre_forward(unit));
    events.push_back(post_forward(unit));
  }
  events.push_back(post_forward(0));
  events.push_back({EventKind::kPreBackward, 0});
  for (int unit = count - 1; unit > 0; --unit) {
    events.push_back({EventKind::kPreBackward, unit});
    events.push_back(post_backward(unit));
  }
  events.push_back(post_backward(0));
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

}  // namespace
}  // namespace fsdp
