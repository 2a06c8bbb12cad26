// A Schedule whose answers are checked by MemoryModels.
#ifndef FSDP_SCHEDULE_TESTING_WATCHED_SCHEDULE_H_
#define FSDP_SCHEDULE_TESTING_WATCHED_SCHEDULE_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/memory_model.h"

namespace fsdp::testing {

class WatchedSchedule {
 public:
  WatchedSchedule(std::vector<ScheduledUnit> units, ScheduleOptions options);

  // These do what Schedule does. Next() returns Internal if these or earlier
  // actions are wrong.
  absl::StatusOr<Actions> Next(const Event& event);
  void SetKept(int unit, bool whole_gradients, bool sums);
  bool synchronizes(int unit) const { return schedule_.synchronizes(unit); }
  bool all_reduces(int unit) const { return schedule_.all_reduces(unit); }
  bool in_forward() const { return schedule_.in_forward(); }
  bool in_backward() const { return schedule_.in_backward(); }
  bool IsUnsharded(int unit) const { return schedule_.IsUnsharded(unit); }
  bool IsHeldForUser(int unit) const { return schedule_.IsHeldForUser(unit); }
  int num_reductions_in_flight() const {
    return schedule_.num_reductions_in_flight();
  }

  // These do what MemoryModel does.
  bool MayWrite() const { return models_.front().MayWrite(); }
  void Write();
  bool MayLook(int unit) const { return models_.front().MayLook(unit); }
  void Look(int unit);
  bool IsOlderThanShards(int unit) const {
    return models_.front().IsOlderThanShards(unit);
  }
  // Returns whether some unit is held for the user.
  bool HoldsUnits() const;

 private:
  absl::Status Check() const;

  Schedule schedule_;
  std::vector<MemoryModel> models_;  // one for each way to share memory
};

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_WATCHED_SCHEDULE_H_
