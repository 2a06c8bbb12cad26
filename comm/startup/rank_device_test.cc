#include "comm/startup/rank_device.h"

#include <c10/core/Device.h>

#include "absl/status/status.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(DeviceOfRankTest, RanksShareTheDevicesThatAreThere) {
  FakeDevice::Register();
  for (const int rank : {0, 1, 4}) {
    ASSERT_OK_AND_ASSIGN(const c10::Device device,
                         DeviceOfRank(c10::DeviceType::PrivateUse1, rank));
    EXPECT_EQ(device, FakeDevice::device());
  }
}

TEST(DeviceOfRankTest, TheCpuIsOne) {
  ASSERT_OK_AND_ASSIGN(const c10::Device device, DeviceOfRank(c10::kCPU, 3));
  EXPECT_EQ(device, c10::Device(c10::kCPU));
}

TEST(DeviceOfRankTest, SaysHowToGetWhatIsNotBuiltIn) {
  EXPECT_THAT(DeviceOfRank(c10::kCUDA, 0),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("without support for cuda devices; for GPUs "
                                 "build with --config=cuda")));
}

}  // namespace
}  // namespace fsdp::comm
