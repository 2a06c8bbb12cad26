// Tests a program without CUDA; its devices are fakes.
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include "absl/status/status.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/staged/staged_backend.h"
#include "comm/startup/environment.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr auto kFake = c10::DeviceType::PrivateUse1;

Environment SecondOf(int ranks_on_host) {
  Environment environment;
  environment.local_rank = 1;
  environment.local_world_size = ranks_on_host;
  return environment;
}

TEST(DeviceChoiceTest, TheCpuNeedsNoBackend) {
  ASSERT_OK_AND_ASSIGN(
      const DeviceChoice found,
      ChooseDevice(c10::kCPU, DeviceBackend::kAuto, SecondOf(2), nullptr));
  EXPECT_TRUE(found.device.is_cpu());
  EXPECT_FALSE(found.connect);
}

TEST(DeviceChoiceTest, RanksThatShareADeviceAreStaged) {
  FakeDevice::Register();
  for (const DeviceBackend backend :
       {DeviceBackend::kAuto, DeviceBackend::kStaged}) {
    ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                         ChooseDevice(kFake, backend, SecondOf(2), nullptr));
    EXPECT_EQ(found.device, FakeDevice::device());
    EXPECT_TRUE(found.connect);
  }
}

TEST(DeviceChoiceTest, RanksWithADeviceEachHaveNccl) {
  FakeDevice::Register();
  c10::Device given(c10::kCPU);
  const NcclOn nccl_on = [&](c10::Device gpu) {
    given = gpu;
    return StagedBackend(gpu);
  };
  ASSERT_OK_AND_ASSIGN(
      const DeviceChoice found,
      ChooseDevice(kFake, DeviceBackend::kAuto, Environment(), nccl_on));
  EXPECT_EQ(given, FakeDevice::device());
  EXPECT_TRUE(found.connect);
}

TEST(DeviceChoiceTest, WhatIsNotLinkedIsTold) {
  FakeDevice::Register();
  const auto error = [](c10::DeviceType type, DeviceBackend backend,
                        const Environment& environment) {
    return ChooseDevice(type, backend, environment, nullptr).status();
  };
  const auto needs = [](const char* text) {
    return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text));
  };
  EXPECT_THAT(error(c10::kCUDA, DeviceBackend::kAuto, Environment()),
              needs("build with --config=cuda"));
  EXPECT_THAT(error(kFake, DeviceBackend::kAuto, Environment()),
              needs("train_cuda of the examples"));
  EXPECT_THAT(error(kFake, DeviceBackend::kNccl, SecondOf(2)),
              needs("nccl on privateuseone:0"));
}

}  // namespace
}  // namespace fsdp::comm
