// Makes golden traces of a Schedule: events by short names, answers as text.
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/memory_model.h"
#include "gtest/gtest.h"

namespace fsdp::testing {

// A Schedule whose answers are checked by MemoryModels.
class WatchedSchedule : public Schedule {
 public:
  WatchedSchedule(std::vector<ScheduledUnit> units, ScheduleOptions options);

  // Returns Internal if these or earlier actions are wrong.
  absl::StatusOr<Actions> Next(const Event& event);
  void SetKept(int unit, bool whole_gradients, bool sums);

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

  std::vector<MemoryModel> models_;  // one for each way to share memory
};

using Events = std::vector<Event>;

// Reads an event of a forward with grad whose output needs it, of a backward
// that synchronizes: "PostBackward(1)", "EndOfBackward". Words in front of it
// say what is otherwise: NoGrad, Recompute, Frozen, Unsync, and Local for a
// SetReduction whose sums are not all-reduced.
Event EventOf(absl::string_view text);

// These are such events.
Event PreForward(int unit);
Event PostForward(int unit);
Event PreBackward(int unit);
Event PostBackward(int unit);
Event PostBackwardFrozen(int unit);
Event EndOfBackward();
Event Reset();

// Makes a root, which is kept after forward as by default, and units inside it.
// parents[i] is the parent of unit i + 1.
std::vector<ScheduledUnit> UnitsWithParents(const std::vector<int>& parents);
// Makes a root and `layers` units in it.
std::vector<ScheduledUnit> Layers(int layers);
// These return the events of their forward and backward.
Events Forward(int layers);
Events Backward(int layers);
Events UnsynchronizedBackward(int layers);

ScheduleOptions NoPrefetch();

// Returns the answers of `schedule` to `events`: "\n", then a line for each
// event, "PreForward(1): Gather(1) WaitGather(1)\n". Before each event the user
// writes shards, if that is allowed. It ends at the first refusal.
std::string Trace(WatchedSchedule& schedule, const Events& events);

// Returns whether the answers to the events in `golden`, a text of Trace(), are
// those that it has.
::testing::AssertionResult Answers(WatchedSchedule& schedule,
                                   absl::string_view golden);

bool AllSharded(const WatchedSchedule& schedule, int num_units);

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_
