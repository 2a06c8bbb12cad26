// Tests a program without CUDA; its devices are fakes.
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/local/local_communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_of_one_host.h"
#include "comm/testing/staged/staged_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr auto kFake = c10::DeviceType::PrivateUse1;

Environment SecondOf(int ranks) {
  Environment environment;
  environment.rank = environment.local_rank = 1;
  environment.world_size = environment.local_world_size = ranks;
  return environment;
}

TEST(DeviceOfRankTest, RanksShareTheDevicesThatAreThere) {
  FakeDevice::Register();
  for (const int rank : {0, 1, 4}) {
    ASSERT_OK_AND_ASSIGN(const c10::Device device, DeviceOfRank(kFake, rank));
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

TEST(DeviceChoiceTest, TheCpuNeedsNoBackend) {
  ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                       ChooseDevice(c10::kCPU, SecondOf(2), nullptr));
  EXPECT_TRUE(found.device.is_cpu());
  EXPECT_FALSE(found.connect);
}

TEST(DeviceChoiceTest, OneRankNeedsNoNccl) {
  FakeDevice::Register();
  ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                       ChooseDevice(kFake, Environment(), nullptr));
  EXPECT_EQ(found.device, FakeDevice::device());
  ConnectOptions options;
  options.device = found.connect;
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Communicator> ranks,
                       Connect(Environment(), options));
  EXPECT_OK(SumRanks(*ranks, FakeDevice::device()));
  EXPECT_OK(SumRanks(*ranks));
}

TEST(DeviceChoiceTest, TheOnlyRankOfAReplicaNeedsNccl) {
  FakeDevice::Register();
  ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                       ChooseDevice(kFake, Environment(), nullptr));
  ASSERT_OK_AND_ASSIGN(const auto replicas, CreateLocalGroup(2));
  EXPECT_THAT(
      found.connect({nullptr, 0, absl::Seconds(5), *replicas[0]}).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("2 ranks on privateuseone:0 need NCCL")));
}

TEST(DeviceChoiceTest, RanksHaveNcclWhereItIsLinked) {
  FakeDevice::Register();
  c10::Device given(c10::kCPU);
  const NcclOn nccl_on = [&](c10::Device gpu) {
    given = gpu;
    return StagedBackend(gpu);
  };
  for (const Environment& environment : {Environment(), SecondOf(2)}) {
    given = c10::Device(c10::kCPU);
    ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                         ChooseDevice(kFake, environment, nccl_on));
    EXPECT_EQ(given, FakeDevice::device());
    EXPECT_TRUE(found.connect);
  }
}

TEST(DeviceChoiceTest, WhatIsNotLinkedIsTold) {
  FakeDevice::Register();
  const auto needs = [](const char* text) {
    return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text));
  };
  EXPECT_THAT(ChooseDevice(c10::kCUDA, Environment(), nullptr).status(),
              needs("build with --config=cuda"));
  EXPECT_THAT(ChooseDevice(kFake, SecondOf(2), nullptr).status(),
              needs("2 ranks on privateuseone:0 need NCCL"));
}

}  // namespace
}  // namespace fsdp::comm
