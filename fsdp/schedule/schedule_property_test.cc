// Checks random models and steps against a model of what may happen.
#include <cstdint>

#include "fsdp/schedule/testing/choices.h"
#include "fsdp/schedule/testing/schedule_run.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::RunSchedule;
using ::fsdp::testing::ScheduleRun;
using ::fsdp::testing::SeededChoices;

constexpr int kStepsPerModel = 8;

TEST(SchedulePropertyTest, AMillionEventsOfRandomModelsKeepTheRules) {
  int64_t num_events = 0;
  for (uint32_t seed = 0; num_events < 1'000'000; ++seed) {
    SeededChoices choices(seed);
    const ScheduleRun run = RunSchedule(&choices, kStepsPerModel);
    ASSERT_EQ(run.error, "") << "seed " << seed;
    num_events += run.num_events;
  }
}

}  // namespace
}  // namespace fsdp
