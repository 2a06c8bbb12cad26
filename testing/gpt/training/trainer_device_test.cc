// Ranks share a fake device, a process each.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"
#include "testing/gpt/testing/device_ranks.h"

namespace gpt {
namespace {

using ::fsdp::testing::FakeDevice;

class TrainerDeviceTest : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, TrainerDeviceTest, ::testing::Values(1, 2, 3));

TEST_P(TrainerDeviceTest, LossesAreThoseOfTheCpuAndTheHostWaitsForNothing) {
  EXPECT_OK(testing::TrainInProcesses(GetParam(), "none"));
}

TEST_P(TrainerDeviceTest, AlsoWhereAllRestsInHostMemory) {
  EXPECT_OK(testing::TrainInProcesses(GetParam(), "cpu"));
}

TEST_P(TrainerDeviceTest, AlsoWhereAllRestsInFiles) {
  EXPECT_OK(testing::TrainInProcesses(GetParam(), "ssd"));
}

// Checks the steps since the last Reset().
absl::Status CheckStreams() {
  const std::vector<std::string> races = FakeDevice::Races();
  const std::vector<std::string> waits = FakeDevice::HostWaits();
  if (races.empty() && waits.empty()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("races:\n", absl::StrJoin(races, "\n"), "\nwaits:\n",
                   absl::StrJoin(waits, "\n")));
}

testing::SharedDevice Fake() {
  testing::SharedDevice device;
  device.type = c10::DeviceType::PrivateUse1;
  device.move = [](torch::nn::Module& module) {
    FakeDevice::Move(module.parameters());
  };
  device.begin = FakeDevice::Reset;
  device.end = CheckStreams;
  device.tolerance = 1e-5;
  return device;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  fsdp::testing::FakeDevice::Register();
  return gpt::testing::TestOrRank(argc, argv, gpt::Fake());
}
