// What the schedule is told of units, as far as options alone decide it.
#ifndef FSDP_SETUP_SCHEDULED_UNITS_H_
#define FSDP_SETUP_SCHEDULED_UNITS_H_

#include "fsdp/options/options.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/setup/shard_plan.h"

namespace fsdp {

// What depends on the ranks that the unit lies on (`replicated`, `sharded`,
// `keeps_part`) and on where its memory is (`shares_memory`, `rests_elsewhere`)
// is left to the caller.
ScheduledUnit ScheduledUnitOf(const PlannedUnit& planned,
                              const Options& options);

ScheduleOptions ScheduleOptionsOf(const Options& options);

}  // namespace fsdp

#endif  // FSDP_SETUP_SCHEDULED_UNITS_H_
