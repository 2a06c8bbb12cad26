
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/memory/locked_pages.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/resting/resting_places.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

OffloadOptions AllOnHost() {
  OffloadOptions options;
  options.parameters = options.gradients = options.optimizer = Tier::kCpu;
  return options;
}

TEST(FasterPlaceTest, IsTheDeviceWhereCopiesAreFast) {
  // Four bytes go up for each byte that the host steps.
  EXPECT_EQ(FasterPlace({40, 40, 11}, AllOnHost()), StepOn::kHost);
  EXPECT_EQ(FasterPlace({40, 40, 9}, AllOnHost()), StepOn::kDevice);
  EXPECT_EQ(FasterPlace({40, 40, 10}, AllOnHost()), StepOn::kDevice);
}

TEST(FasterPlaceTest, CountsTheSlowerDirection) {
  // Three bytes go down for each.
  EXPECT_EQ(FasterPlace({4000, 30, 9}, AllOnHost()), StepOn::kDevice);
  EXPECT_EQ(FasterPlace({4000, 30, 11}, AllOnHost()), StepOn::kHost);
}

TEST(FasterPlaceTest, CountsGradientsThatHaveToComeDown) {
  OffloadOptions options = AllOnHost();
  options.gradients = Tier::kDevice;
  // Three bytes go up and three down, or one goes down.
  EXPECT_EQ(FasterPlace({30, 30, 1000}, options), StepOn::kHost);
  EXPECT_EQ(FasterPlace({1000, 30, 11}, options), StepOn::kHost);
  EXPECT_EQ(FasterPlace({1000, 30, 9}, options), StepOn::kDevice);
}

TEST(FasterPlaceTest, CountsTheOptimizersStates) {
  OffloadOptions options = AllOnHost();
  options.optimizer_state = 1;
  EXPECT_EQ(FasterPlace({30, 30, 11}, options), StepOn::kHost);
  EXPECT_EQ(FasterPlace({30, 30, 9}, options), StepOn::kDevice);
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
