#include "fsdp/memory/memory_plan.h"

#include <algorithm>
#include <deque>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
namespace {

struct Gauge {
  int64_t now = 0;
  int64_t peak = 0;

  void Add(int64_t bytes) {
    now += bytes;
    peak = std::max(peak, now);
  }
};

// Counts the buffers that a BufferPool would have handed out.
class PoolGauge {
 public:
  using Buffers = std::vector<int64_t>;  // their sizes

  Buffers Acquire(const Buffers& bytes) {
    Buffers result;
    for (const int64_t each : bytes) {
      const auto smallest = free_.lower_bound(each);
      const bool fits =
          smallest != free_.end() && internal::Fits(*smallest, each);
      result.push_back(fits ? *smallest : each);
      if (fits) {
        free_.erase(smallest);
      } else {
        ++allocations_;
      }
      in_use_.Add(result.back());
    }
    return result;
  }
  void Release(Buffers& buffers) {
    for (const int64_t size : buffers) {
      in_use_.Add(-size);
      free_.insert(size);
    }
    buffers.clear();
  }
  int64_t peak() const { return in_use_.peak; }
  int allocations() const { return allocations_; }

 private:
  Gauge in_use_;
  int allocations_ = 0;
  std::multiset<int64_t> free_;
};

class Simulation {
 public:
  Simulation(const std::vector<ScheduledUnit>& units,
             const std::vector<UnitBytes>& bytes,
             const ScheduleOptions& options)
      : units_(units),
        bytes_(bytes),
        schedule_(units, options),
        gathered_buffers_(units.size()),
        whole_gradients_(units.size()),
        sums_(units.size()),
        children_(units.size()) {
    for (size_t i = 1; i < units.size(); ++i) {
      children_[units[i].parent].push_back(static_cast<int>(i));
    }
  }

  void Run(int backwards) {
    const bool in_part = absl::c_any_of(bytes_, [](const UnitBytes& unit) {
      return !unit.synchronizes || !unit.all_reduces;
    });
    for (int i = 1; i <= backwards; ++i) {
      const bool is_last = i == backwards;
      if (in_part) SetReductions(is_last);
      Forward(0);
      Backward(0, /*synchronizes=*/is_last || in_part);
      Event end{EventKind::kEndOfBackward};
      end.synchronizes = is_last || in_part;
      Report(end);
    }
  }

  int64_t gathered() const { return gathered_.peak(); }
  int64_t parts() const { return parts_.peak; }
  int allocations() const {
    return gathered_.allocations() + in_flight_.allocations();
  }
  int64_t in_flight() const { return in_flight_.peak(); }
  int64_t messages() const { return messages_.peak; }

 private:
  struct Reduction {
    int unit;
    PoolGauge::Buffers buffers;
  };

  void SetReductions(bool all) {
    for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
      Event event{EventKind::kSetReduction, i};
      event.synchronizes = all || bytes_[i].synchronizes;
      event.all_reduces = all || bytes_[i].all_reduces;
      Report(event);
    }
  }

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
    PoolGauge::Buffers& gathered = gathered_buffers_[action.unit];
    PoolGauge::Buffers& sums = sums_[action.unit];
    switch (action.kind) {
      case ActionKind::kGather:
        gathered = gathered_.Acquire(bytes.unsharded);
        messages_.Add(bytes.gather_messages);
        break;
      case ActionKind::kWaitGather:
        messages_.Add(-bytes.gather_messages);
        break;
      case ActionKind::kFree:
        gathered_.Release(gathered);
        break;
      case ActionKind::kShrink:
        parts_.Add(bytes.part);
        gathered_.Release(gathered);
        break;
      case ActionKind::kDropPart:
        parts_.Add(-bytes.part);
        break;
      case ActionKind::kAccumulate:
        FillBuffer(action.unit);
        break;
      case ActionKind::kFillReduceBuffer:
        if (!bytes.takes_gradients || !whole_gradients_[action.unit].empty()) {
          FillBuffer(action.unit);
        }
        reductions_.push_back(
            {action.unit, std::exchange(whole_gradients_[action.unit], {})});
        break;
      case ActionKind::kReduce:
        messages_.Add(bytes.reduce_messages);
        break;
      case ActionKind::kReplicate:
        in_flight_.Release(sums);
        break;
      case ActionKind::kKeepSums:
        if (sums.empty()) sums = in_flight_.Acquire(SegmentsOf(bytes));
        [[fallthrough]];
      case ActionKind::kWaitReduce:
        FSDP_CHECK(reductions_.front().unit == action.unit);
        in_flight_.Release(reductions_.front().buffers);
        reductions_.pop_front();
        messages_.Add(-bytes.reduce_messages);
        break;
      default:
        break;
    }
  }

  static PoolGauge::Buffers SegmentsOf(const UnitBytes& bytes) {
    PoolGauge::Buffers segments = bytes.reduce_buffers;
    for (int64_t& segment : segments) segment /= bytes.ranks;
    return segments;
  }

  void FillBuffer(int unit) {
    PoolGauge::Buffers& whole = whole_gradients_[unit];
    if (whole.empty()) whole = in_flight_.Acquire(bytes_[unit].reduce_buffers);
  }

  const std::vector<ScheduledUnit>& units_;
  const std::vector<UnitBytes>& bytes_;
  Schedule schedule_;
  std::vector<PoolGauge::Buffers> gathered_buffers_;  // per unit
  std::vector<PoolGauge::Buffers> whole_gradients_;   // likewise
  std::vector<PoolGauge::Buffers> sums_;              // likewise
  std::deque<Reduction> reductions_;                  // oldest first
  std::vector<std::vector<int>> children_;
  PoolGauge gathered_;
  Gauge parts_;
  PoolGauge in_flight_;
  Gauge messages_;
};

}  // namespace

std::string MemoryPlan::ToString() const {
  constexpr double kMiB = 1 << 20;
  std::string text =
      absl::StrFormat("%-34s %12s\n", "memory of this rank", "MiB");
  const auto add = [&text](const char* kind, int64_t bytes) {
    absl::StrAppendFormat(&text, "  %-32s %12.2f\n", kind,
                          static_cast<double>(bytes) / kMiB);
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
        options.optimizer_state *
        static_cast<double>(unit.shard + unit.away - unit.stateless));
  }
  if (schedule_options.step_in_backward) plan.gradients = largest_gradient;
  Simulation simulation(units, bytes, schedule_options);
  // The first step records the order by which later ones prefetch. A step that
  // allocates nothing leaves the pools as it found them.
  constexpr int kMostSteps = 32;
  int before = -1;
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= 2 && simulation.allocations() == before) break;
    before = simulation.allocations();
    simulation.Run(std::max(1, options.backwards_per_step));
  }
  plan.gathered = simulation.gathered();
  plan.parts = simulation.parts();
  plan.in_flight = simulation.in_flight();
  plan.messages = simulation.messages();
  return plan;
}

}  // namespace fsdp
