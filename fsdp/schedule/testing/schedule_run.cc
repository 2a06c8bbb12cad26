#include "fsdp/schedule/testing/schedule_run.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/random_steps.h"
#include "fsdp/schedule/testing/schedule_checker.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "fsdp/schedule/testing/watched_schedule.h"

namespace fsdp::testing {
namespace {

bool IsRequest(const Event& event) {
  return event.kind == EventKind::kUnshard ||
         event.kind == EventKind::kWaitUnshard ||
         event.kind == EventKind::kReshard ||
         event.kind == EventKind::kRelease ||
         event.kind == EventKind::kSetReduction;
}

bool IsBackward(const Event& event) {
  return event.recomputes || event.kind == EventKind::kPreBackward ||
         event.kind == EventKind::kPostBackward ||
         event.kind == EventKind::kEndOfBackward;
}

// Returns before which events of a step a user may write shards: up to its
// first forward, and after its last backward.
std::vector<bool> MayWriteBefore(const Events& step) {
  const auto first = std::find_if(
      step.begin(), step.end(),
      [](const Event& event) { return event.kind == EventKind::kPreForward; });
  const auto last = std::find_if(step.rbegin(), step.rend(), IsBackward);
  std::vector<bool> may(step.size());
  for (size_t i = 0; i < step.size(); ++i) {
    const auto event = step.begin() + static_cast<int64_t>(i);
    may[i] = event <= first || event >= last.base();
  }
  return may;
}

class Run {
 public:
  explicit Run(Choices* choices)
      : choices_(*choices),
        model_(choices),
        writes_(choices->Chance(70)),
        schedule_(model_.units(), model_.options()),
        other_rank_(model_.units(), model_.options()),
        checker_(model_.units(), model_.options()) {}

  ScheduleRun Steps(int steps) {
    for (int i = 0; i < steps && result_.error.empty(); ++i) {
      history_.clear();
      Step();
      if (!result_.error.empty()) {
        result_.error = absl::StrCat("step ", i, ": ", result_.error, history_);
      }
    }
    return result_;
  }

 private:
  void Step() {
    // Nonsense may run backward through graphs that are older than a write.
    const bool nonsense = choices_.Chance(15);
    if (nonsense && writes_) Report(Reset());
    const Events events = nonsense ? model_.Nonsense() : model_.Step();
    const std::vector<bool> may_write = MayWriteBefore(events);
    const bool trains = std::any_of(events.begin(), events.end(), IsBackward);
    for (size_t i = 0; i < events.size() && result_.error.empty(); ++i) {
      if (writes_ && !nonsense && may_write[i]) UserActs(events[i].unit);
      // A refused request has no effect; other failures give up the iteration.
      const bool refused = (trains || nonsense || events[i].records_graph) &&
                           IsRefusedAbove(events[i]);
      const bool goes_on =
          refused ? nonsense
                  : Report(events[i]) || nonsense || IsRequest(events[i]);
      if (goes_on) continue;
      Report(Reset());
      return;
    }
  }

  void UserActs(int unit) {
    if (schedule_.MayLook(unit) && choices_.Chance(50)) {
      absl::StrAppend(&history_, "\n  look at ", unit);
      schedule_.Look(unit);
    }
    if (schedule_.MayWrite() && choices_.Chance(50)) {
      absl::StrAppend(&history_, "\n  write");
      schedule_.Write();
    }
  }

  // ShardedModel refuses a forward of old values that has a backward to come.
  bool IsRefusedAbove(const Event& event) const {
    return event.kind == EventKind::kPreForward && !event.recomputes &&
           schedule_.IsHeldForUser(event.unit) &&
           schedule_.IsOlderThanShards(event.unit);
  }

  // Returns false if the event is refused.
  bool Report(const Event& event) {
    ++result_.num_events;
    const absl::StatusOr<Actions> actions = schedule_.Next(event);
    Record(event, actions);
    const absl::StatusOr<Actions> other = other_rank_.Next(event);
    if (absl::IsInternal(actions.status())) {
      result_.error = std::string(actions.status().message());
    } else if (other.ok() != actions.ok() ||
               (actions.ok() && *other != *actions)) {
      result_.error = absl::StrCat(ToString(event), ": ranks disagree");
    } else {
      result_.error = checker_.Check(event, actions);
    }
    return actions.ok();
  }

  void Record(const Event& event, const absl::StatusOr<Actions>& actions) {
    absl::StrAppend(&history_, "\n  ", ToString(event), ":");
    if (!actions.ok()) absl::StrAppend(&history_, " refused");
    for (const Action& action : actions.ok() ? *actions : Actions()) {
      absl::StrAppend(&history_, " ", ToString(action));
    }
  }

  Choices& choices_;
  RandomModel model_;
  const bool writes_;
  WatchedSchedule schedule_;
  Schedule other_rank_;
  ScheduleChecker checker_;
  ScheduleRun result_;
  std::string history_;
};

}  // namespace

ScheduleRun RunSchedule(Choices* choices, int steps) {
  return Run(choices).Steps(steps);
}

}  // namespace fsdp::testing
