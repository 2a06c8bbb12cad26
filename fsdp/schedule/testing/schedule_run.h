// Runs random steps of a random model and checks them.
#ifndef FSDP_SCHEDULE_TESTING_SCHEDULE_RUN_H_
#define FSDP_SCHEDULE_TESTING_SCHEDULE_RUN_H_

#include <cstdint>
#include <string>

#include "fsdp/schedule/testing/choices.h"

namespace fsdp::testing {

struct ScheduleRun {
  std::string error;  // with the events before it; "": every rule was kept
  int64_t num_events = 0;
};

// Runs `steps` of a model that `choices` make, on two ranks that have to agree.
ScheduleRun RunSchedule(Choices* choices, int steps);

}  // namespace fsdp::testing

#endif  // FSDP_SCHEDULE_TESTING_SCHEDULE_RUN_H_
