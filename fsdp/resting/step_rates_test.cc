#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/memory/device_copies.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/resting_places.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(FasterPlaceTest, CountsWhatIsMovedForEachByteThatTheHostSteps) {
  struct Case {
    Tier gradients;
    double states;  // per byte of parameters
    StepRates rates;
    bool on_host;
  };
  const std::vector<Case> cases = {
      // Four bytes go up.
      {Tier::kCpu, 2, {40, 40, 11}, true},
      {Tier::kCpu, 2, {40, 40, 9}, false},
      {Tier::kCpu, 2, {40, 40, 10}, false},
      // Three bytes go down.
      {Tier::kCpu, 2, {4000, 30, 9}, false},
      {Tier::kCpu, 2, {4000, 30, 11}, true},
      // Three bytes go up and three down, or one goes down.
      {Tier::kDevice, 2, {30, 30, 1000}, true},
      {Tier::kDevice, 2, {1000, 30, 11}, true},
      {Tier::kDevice, 2, {1000, 30, 9}, false},
      {Tier::kCpu, 1, {30, 30, 11}, true},
      {Tier::kCpu, 1, {30, 30, 9}, false}};
  for (size_t i = 0; i < cases.size(); ++i) {
    OffloadOptions options;
    options.parameters = options.optimizer = Tier::kCpu;
    options.gradients = cases[i].gradients;
    options.optimizer_state = cases[i].states;
    EXPECT_EQ(FasterPlace(cases[i].rates, options),
              cases[i].on_host ? StepOn::kHost : StepOn::kDevice)
        << i;
  }
}

TEST(StepRatesTest, AreMeasured) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  const auto rates = MeasureStepRates(FakeDevice::device(), pages,
                                      absl::Now() + absl::Seconds(60));
  ASSERT_OK(rates);
  // All rates are between a byte and a terabyte per second.
  for (const double rate : {rates->up, rates->down, rates->host_step}) {
    EXPECT_GT(rate, 1);
    EXPECT_LT(rate, 1e13);
  }
  EXPECT_THAT(FakeDevice::HostWaits(), ::testing::IsEmpty());
}

TEST(StepRatesTest, SayWhenTheDeviceHangs) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  const FakeDevice::Stall stall;
  EXPECT_THAT(MeasureStepRates(FakeDevice::device(), pages,
                               absl::Now() + absl::Milliseconds(3))
                  .status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("copy")));
}

TEST(StepRatesTest, OfTheSlowestRankCount) {
  EXPECT_OK(comm::testing::RunAllRanks(
      3, [](comm::Communicator& world) -> absl::Status {
        const double rank = world.rank();
        FSDP_ASSIGN_OR_RETURN(
            const StepRates rates,
            SlowestStepRates({7 + rank, 9 - rank, 5}, world, "rates",
                             absl::Now() + absl::Seconds(60)));
        EXPECT_EQ(rates.up, 7);
        EXPECT_EQ(rates.down, 7);
        EXPECT_EQ(rates.host_step, 5);
        return absl::OkStatus();
      }));
}

}  // namespace
}  // namespace fsdp
