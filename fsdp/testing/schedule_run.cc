#include "fsdp/testing/schedule_run.h"

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule.h"
#include "fsdp/testing/random_steps.h"
#include "fsdp/testing/schedule_checker.h"
#include "fsdp/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

class Run {
 public:
  explicit Run(Choices* choices)
      : model_(choices),
        schedule_(model_.units(), model_.options()),
        other_rank_(model_.units(), model_.options()),
        checker_(model_.units(), model_.options()) {}

  ScheduleRun Steps(Choices* choices, int steps) {
    ScheduleRun result;
    for (int i = 0; i < steps && result.error.empty(); ++i) {
      history_.clear();
      const bool nonsense = choices->Chance(15);
      const Events events = nonsense ? model_.Nonsense() : model_.Step();
      for (const Event& event : events) {
        ++result.num_events;
        bool refused = false;
        const std::string error = Report(event, &refused);
        if (!error.empty()) {
          result.error = absl::StrCat("step ", i, ": ", error, history_);
          return result;
        }
        // A request is refused and nothing more; anything else has the
        // iteration given up.
        if (!refused || nonsense || IsRequest(event)) continue;
        result.error = Report(Reset(), &refused);
        break;
      }
    }
    return result;
  }

 private:
  static bool IsRequest(const Event& event) {
    return event.kind == EventKind::kReshard ||
           event.kind == EventKind::kRelease;
  }

  std::string Report(const Event& event, bool* refused) {
    const absl::StatusOr<Actions> actions = schedule_.Next(event);
    *refused = !actions.ok();
    Record(event, actions);
    const absl::StatusOr<Actions> other = other_rank_.Next(event);
    if (other.ok() != actions.ok() || (actions.ok() && *other != *actions)) {
      return absl::StrCat(ToString(event), ": ranks disagree");
    }
    return checker_.Check(event, actions);
  }

  // Of this step.
  void Record(const Event& event, const absl::StatusOr<Actions>& actions) {
    absl::StrAppend(&history_, "\n  ", ToString(event), ":");
    if (!actions.ok()) absl::StrAppend(&history_, " refused");
    for (const Action& action : actions.ok() ? *actions : Actions()) {
      absl::StrAppend(&history_, " ", ToString(action));
    }
  }

  RandomModel model_;
  Schedule schedule_;
  Schedule other_rank_;
  ScheduleChecker checker_;
  std::string history_;
};

}  // namespace

ScheduleRun RunSchedule(Choices* choices, int steps) {
  return Run(choices).Steps(choices, steps);
}

}  // namespace fsdp::testing
