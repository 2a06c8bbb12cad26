// Checks random models and steps against models of what may happen.
#include <cstdint>

#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_run.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

TEST(SchedulePropertyTest, AMillionEventsOfRandomModelsKeepTheRules) {
  constexpr int kStepsPerModel = 8;
  int64_t num_events = 0;
  for (uint32_t seed = 0; num_events < 1'000'000; ++seed) {
    SeededChoices choices(seed);
    const ScheduleRun run = RunSchedule(&choices, kStepsPerModel);
    ASSERT_EQ(run.error, "") << "seed " << seed;
    num_events += run.num_events;
  }
}

}  // namespace
}  // namespace fsdp::testing
