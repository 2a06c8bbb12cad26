// Golden traces of a Schedule: events by short names, answers as text.
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_

#include <string>
#include <vector>

#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/watched_schedule.h"

namespace fsdp::testing {

using Events = std::vector<Event>;

// Forward with grad, of an output that needs it, unless the name says no.
Event PreForward(int unit);
Event PreForwardNoGrad(int unit);
Event PostForward(int unit);
Event PostForwardNoGrad(int unit);
// `event` of a forward, inside backward.
Event Recomputes(Event event);
Event PreBackward(int unit);
Event PostBackward(int unit);
Event PostBackwardFrozen(int unit);
Event EndOfBackward();
Event Reset();
Event Unshard(int unit);
Event WaitUnshard(int unit);
Event Reshard(int unit);
Event Release();
// `event` of a backward that keeps gradients whole.
Event Unsynchronized(Event event);

// A root that is kept after forward, as by default, and units inside it.
// parents[i] is the parent of unit i + 1.
std::vector<ScheduledUnit> UnitsWithParents(const std::vector<int>& parents);
// A root and `layers` units in it.
std::vector<ScheduledUnit> Layers(int layers);
// Their forward and backward, one after the other.
Events Forward(int layers);
Events Backward(int layers);
Events UnsynchronizedBackward(int layers);

ScheduleOptions NoPrefetch();

// What `schedule` answers to `events`, before each of which the user writes
// shards where that is allowed: "\n", then one line for each event,
// "PreForward(1): Gather(1) WaitGather(1)\n". Ends at the first refusal.
std::string Trace(WatchedSchedule& schedule, const Events& events);
// The actions alone, in one line.
std::string ActionsOf(WatchedSchedule& schedule, const Events& events);

bool AllSharded(const WatchedSchedule& schedule, int num_units);

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_TRACE_H_
