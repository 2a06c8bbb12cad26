#include "fsdp/schedule/testing/watched_schedule.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace fsdp::testing {

WatchedSchedule::WatchedSchedule(std::vector<ScheduledUnit> units,
                                 ScheduleOptions options)
    : schedule_(units, options) {
  models_.emplace_back(units, options, Sharing::kInPlace);
  if (std::any_of(units.begin(), units.end(), [](const ScheduledUnit& unit) {
        return unit.shares_memory;
      })) {
    models_.emplace_back(units, options, Sharing::kCommonCopy);
  }
}

absl::StatusOr<Actions> WatchedSchedule::Next(const Event& event) {
  absl::StatusOr<Actions> actions = schedule_.Next(event);
  if (actions.ok()) {
    for (MemoryModel& model : models_) model.Happens(event, *actions);
  }
  const absl::Status status = Check();
  return status.ok() ? std::move(actions) : status;
}

void WatchedSchedule::SetKept(int unit, bool whole_gradients, bool sums) {
  schedule_.SetKept(unit, whole_gradients, sums);
  for (MemoryModel& model : models_) {
    if (!whole_gradients) model.DropWholeGradients(unit);
    if (!sums) model.DropSums(unit);
  }
}

void WatchedSchedule::Write() {
  for (MemoryModel& model : models_) model.Write();
}

void WatchedSchedule::Look(int unit) {
  for (MemoryModel& model : models_) model.Look(unit);
}

bool WatchedSchedule::HoldsUnits() const {
  for (size_t i = 0; i < schedule_.units().size(); ++i) {
    if (schedule_.IsHeldForUser(static_cast<int>(i))) return true;
  }
  return false;
}

absl::Status WatchedSchedule::Check() const {
  for (const MemoryModel& model : models_) {
    if (!model.violation().empty()) {
      return absl::InternalError(
          absl::StrCat(&model == &models_.front() ? "" : "with a common copy: ",
                       model.violation()));
    }
  }
  return absl::OkStatus();
}

}  // namespace fsdp::testing
