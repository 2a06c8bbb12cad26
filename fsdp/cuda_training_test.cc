// Training on a GPU: the CPU's values, and no call by which the host waits for
// it. Runs where a GPU is.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/nn/module.h>

#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "fsdp/testing/device_programs.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::DeviceProgram;
using ::fsdp::testing::DevicePrograms;
using ::fsdp::testing::TrainingDevice;
using ::fsdp::testing::TrainOnDevice;
using ::fsdp::testing::Values;
using ::testing::IsEmpty;

void RefuseWaits(bool refuse) {
  c10::cuda::warning_state().set_sync_debug_mode(
      refuse ? c10::cuda::SyncDebugMode::L_ERROR
             : c10::cuda::SyncDebugMode::L_DISABLED);
}

// A wait of the host in any step but the first is an error of that step.
TrainingDevice Gpu() {
  TrainingDevice gpu;
  gpu.device = c10::Device(c10::kCUDA, 0);
  gpu.move = [](torch::nn::Module& module) {
    module.to(c10::Device(c10::kCUDA, 0));
  };
  gpu.begin = [] { RefuseWaits(true); };
  gpu.end = [] { RefuseWaits(false); };
  return gpu;
}

class CudaTrainingTest
    : public ::testing::TestWithParam<std::tuple<DeviceProgram, int>> {
 protected:
  // A step that fails does not come to its end.
  void TearDown() override { RefuseWaits(false); }
};

TEST_P(CudaTrainingTest, HasTheValuesOfTheCpuAndTheHostWaitsForNothing) {
  const auto& [program, world_size] = GetParam();
  const absl::StatusOr<Values> expected =
      TrainOnDevice(program, world_size, TrainingDevice());
  ASSERT_OK(expected.status());
  const absl::StatusOr<Values> actual =
      TrainOnDevice(program, world_size, Gpu());
  ASSERT_OK(actual.status());
  const double tolerance = program.is_coarse ? 1e-2 : 1e-4;
  for (const auto& [name, value] : *expected) {
    EXPECT_TRUE(at::allclose(actual->at(name), value, 1e-4, tolerance))
        << name << ": " << actual->at(name) - value;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaTrainingTest,
    ::testing::Combine(::testing::ValuesIn(DevicePrograms()),
                       ::testing::Values(1, 2, 3, 5)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "Of",
                          std::get<1>(info.param));
    });

TEST(CudaOffloadTest, SteppedOnTheHostHasTheBitsOfAnOptimizerOnTheCpu) {
  TrainingDevice gpu = Gpu();
  const auto different = fsdp::testing::DifferencesFromStepsOnTheCpu(gpu);
  ASSERT_OK(different);
  EXPECT_THAT(*different, IsEmpty());
}

}  // namespace
}  // namespace fsdp
