#include "fsdp/memory_plan.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "base/check.h"

namespace fsdp {
namespace {

// Bytes alive, and the most there were.
struct Gauge {
  int64_t now = 0;
  int64_t peak = 0;

  void Add(int64_t bytes) {
    now += bytes;
    peak = std::max(peak, now);
  }
};

class Simulation {
 public:
  Simulation(const std::vector<ScheduledUnit>& units,
             const std::vector<UnitBytes>& bytes,
             const ScheduleOptions& options)
      : units_(units),
        bytes_(bytes),
        schedule_(units, options),
        has_whole_gradients_(units.size(), false),
        children_(units.size()) {
    for (size_t i = 1; i < units.size(); ++i) {
      children_[units[i].parent].push_back(static_cast<int>(i));
    }
  }

  void Run(int backwards) {
    for (int i = 1; i <= backwards; ++i) {
      Forward(0);
      Backward(0, /*synchronizes=*/i == backwards);
      Event end{EventKind::kEndOfBackward};
      end.synchronizes = i == backwards;
      Report(end);
    }
  }

  int64_t gathered() const { return gathered_.peak; }
  int64_t parts() const { return parts_.peak; }
  int64_t in_flight() const { return in_flight_.peak; }
  int64_t messages() const { return messages_.peak; }

 private:
  void Forward(int unit) {
    Event before{EventKind::kPreForward, unit};
    before.records_graph = true;
    Report(before);
    for (int child : children_[unit]) Forward(child);
    Event after{EventKind::kPostForward, unit};
    after.expects_backward = true;
    Report(after);
  }

  void Backward(int unit, bool synchronizes) {
    Report({EventKind::kPreBackward, unit});
    const std::vector<int>& children = children_[unit];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      Backward(*child, synchronizes);
    }
    Event after{EventKind::kPostBackward, unit};
    after.reduces = bytes_[unit].trainable;
    after.synchronizes = synchronizes;
    Report(after);
  }

  void Report(const Event& event) {
    const absl::StatusOr<Actions> actions = schedule_.Next(event);
    FSDP_CHECK(actions.ok());
    for (const Action& action : *actions) Apply(action);
  }

  void Apply(const Action& action) {
    const UnitBytes& bytes = bytes_[action.unit];
    switch (action.kind) {
      case ActionKind::kGather:
      case ActionKind::kGatherCopy:
        gathered_.Add(bytes.unsharded);
        messages_.Add(bytes.gather_messages);
        break;
      case ActionKind::kWaitGather:
        messages_.Add(-bytes.gather_messages);
        break;
      case ActionKind::kFree:
        gathered_.Add(-bytes.unsharded);
        break;
      case ActionKind::kShrink:
        parts_.Add(bytes.part);
        gathered_.Add(-bytes.unsharded);
        break;
      case ActionKind::kDropPart:
        parts_.Add(-bytes.part);
        break;
      case ActionKind::kAccumulate:
        FillBuffer(action.unit);
        has_whole_gradients_[action.unit] = true;
        break;
      case ActionKind::kFillReduceBuffer:
        FillBuffer(action.unit);
        has_whole_gradients_[action.unit] = false;
        break;
      case ActionKind::kReduce:
        messages_.Add(bytes.reduce_messages);
        break;
      case ActionKind::kWaitReduce:
        in_flight_.Add(-bytes.reduce_buffer);
        messages_.Add(-bytes.reduce_messages);
        break;
      default:
        break;
    }
  }

  void FillBuffer(int unit) {
    if (has_whole_gradients_[unit]) return;
    in_flight_.Add(bytes_[unit].reduce_buffer);
  }

  const std::vector<ScheduledUnit>& units_;
  const std::vector<UnitBytes>& bytes_;
  Schedule schedule_;
  std::vector<bool> has_whole_gradients_;
  std::vector<std::vector<int>> children_;
  Gauge gathered_;
  Gauge parts_;
  Gauge in_flight_;
  Gauge messages_;
};

}  // namespace

std::string MemoryPlan::ToString() const {
  constexpr double kMiB = 1 << 20;
  std::string text =
      absl::StrFormat("%-34s %12s\n", "memory of this rank", "MiB");
  const auto add = [&text](const char* kind, int64_t bytes) {
    absl::StrAppendFormat(&text, "  %-32s %12.2f\n", kind, bytes / kMiB);
  };
  add("shards", shards);
  add("gradients of shards", gradients);
  add("optimizer state", optimizer);
  add("gathered units, at most", gathered);
  if (copies > 0) add("shared copies to compute with", copies);
  if (parts > 0) add("parts for smaller groups, at most", parts);
  add("reduce buffers, at most", in_flight);
  if (messages > 0) add("quantised messages, at most", messages);
  if (transfers > 0) add("buffers for offload", transfers);
  add("total", total());
  return text;
}

MemoryPlan PlanMemory(const std::vector<ScheduledUnit>& units,
                      const std::vector<UnitBytes>& bytes,
                      const ScheduleOptions& schedule_options,
                      const MemoryPlanOptions& options) {
  FSDP_CHECK(units.size() == bytes.size());
  MemoryPlan plan;
  int64_t largest_gradient = 0;
  for (const UnitBytes& unit : bytes) {
    plan.shards += unit.shard;
    plan.copies += unit.copy;
    if (!unit.trainable) continue;
    plan.gradients += unit.gradient;
    largest_gradient = std::max(largest_gradient, unit.gradient);
    plan.optimizer += static_cast<int64_t>(
        options.optimizer_state * (unit.shard + unit.away - unit.states_away));
  }
  if (schedule_options.step_in_backward) plan.gradients = largest_gradient;
  Simulation simulation(units, bytes, schedule_options);
  // The first step records the order that later ones prefetch by.
  for (int step = 0; step < 2; ++step) {
    simulation.Run(std::max(1, options.backwards_per_step));
  }
  plan.gathered = simulation.gathered();
  plan.parts = simulation.parts();
  plan.in_flight = simulation.in_flight();
  plan.messages = simulation.messages();
  return plan;
}

}  // namespace fsdp
