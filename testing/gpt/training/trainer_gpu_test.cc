// Ranks share a GPU, a process each, and exchange by way of host memory.
#include <c10/core/DeviceType.h>
#include <torch/nn/module.h>

#include "base/testing/status_matchers.h"
#include "gtest/gtest.h"
#include "testing/gpt/testing/device_ranks.h"

namespace gpt {
namespace {

TEST(TrainerGpuTest, TwoRanksOnOneGpuHaveTheLossesOfTheCpu) {
  EXPECT_OK(testing::TrainInProcesses(/*ranks=*/2, "none"));
}

TEST(TrainerGpuTest, AlsoWhereAllRestsInHostMemory) {
  EXPECT_OK(testing::TrainInProcesses(/*ranks=*/2, "cpu"));
}

TEST(TrainerGpuTest, AlsoWhereAllRestsInFiles) {
  EXPECT_OK(testing::TrainInProcesses(/*ranks=*/2, "ssd"));
}

testing::SharedDevice Gpu() {
  testing::SharedDevice device;
  device.type = c10::kCUDA;
  device.move = [](torch::nn::Module& module) { module.to(c10::kCUDA); };
  device.tolerance = 1e-3;
  return device;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  return gpt::testing::TestOrRank(argc, argv, gpt::Gpu());
}
