// Training on a GPU gives the CPU's values, and the host does not wait for it.
// Needs a GPU.
#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/nccl/nccl_communicator.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/wrappers/paired_communicator.h"
#include "fsdp/testing/device_programs.h"

namespace fsdp::testing {
namespace {

void RefuseWaits(bool refuse) {
  c10::cuda::warning_state().set_sync_debug_mode(
      refuse ? c10::cuda::SyncDebugMode::L_ERROR
             : c10::cuda::SyncDebugMode::L_DISABLED);
}

// If the host waits in any step but the first, that step fails.
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

void ExpectTheValuesOfTheCpu(const DeviceProgram& program, int world_size,
                             TrainingDevice gpu) {
  if (program.looks_at_values) gpu.begin = [] {};
  ASSERT_OK_AND_ASSIGN(const Values expected,
                       TrainOnDevice(program, world_size, TrainingDevice()));
  ASSERT_OK_AND_ASSIGN(const Values actual,
                       TrainOnDevice(program, world_size, gpu));
  const double tolerance = program.is_coarse ? 1e-2 : 1e-4;
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(at::allclose(actual.at(name), value, 1e-4, tolerance))
        << name << ": " << actual.at(name) - value;
  }
}

class CudaTrainingTest
    : public ::testing::TestWithParam<std::tuple<DeviceProgram, int>> {
 protected:
  // A step that fails does not reach its end.
  void TearDown() override { RefuseWaits(false); }
};

TEST_P(CudaTrainingTest, HasTheValuesOfTheCpuAndTheHostWaitsForNothing) {
  const auto& [program, world_size] = GetParam();
  ExpectTheValuesOfTheCpu(program, world_size, Gpu());
}

INSTANTIATE_TEST_SUITE_P(
    All, CudaTrainingTest,
    ::testing::Combine(::testing::ValuesIn(DevicePrograms()),
                       ::testing::Values(1, 2, 3, 5)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "Of",
                          std::get<1>(info.param));
    });

// Returns the first of `world_size` ranks, for which the host's collectives are
// played.
absl::StatusOr<std::shared_ptr<Communicator>> OverNccl(int world_size) {
  FSDP_ASSIGN_OR_RETURN(auto device, comm::CreateNcclCommunicator(
                                         c10::make_intrusive<c10d::HashStore>(),
                                         /*rank=*/0, world_size));
  comm::LoopbackOptions loopback;
  loopback.place = {0, world_size};
  FSDP_ASSIGN_OR_RETURN(auto host, comm::CreateLoopback(loopback));
  return comm::CreatePairedCommunicator(std::move(host), std::move(device));
}

// Tests with NCCL's memory.
class NcclTrainingTest : public ::testing::TestWithParam<DeviceProgram> {
 protected:
  void TearDown() override { RefuseWaits(false); }
};

TEST_P(NcclTrainingTest, HasTheValuesOfTheCpuAndTheHostWaitsForNothing) {
  TrainingDevice gpu = Gpu();
  gpu.world = [](int world_size) { return OverNccl(world_size); };
  ExpectTheValuesOfTheCpu(GetParam(), /*world_size=*/1, gpu);
}

INSTANTIATE_TEST_SUITE_P(All, NcclTrainingTest,
                         ::testing::ValuesIn(DevicePrograms()),
                         [](const auto& info) { return info.param.name; });

// Collectives run on the device, wherever the values are.
TEST(CudaFullParamsTest, WhatIsWrittenOnTheCpuGoesBackToTheGpu) {
  const TrainingDevice gpu = Gpu();
  const std::shared_ptr<NetImpl> net = MakeNet(/*dim=*/6, /*num_blocks=*/2);
  gpu.move(*net);
  comm::LoopbackOptions loopback;
  loopback.device = gpu.device;
  ASSERT_OK_AND_ASSIGN(std::shared_ptr<Communicator> world,
                       comm::CreateLoopback(loopback));
  ASSERT_OK_AND_ASSIGN(auto model, FullyShard(net, world, BlockUnits()));
  SummonOptions options;
  options.rank0_only = options.offload_to_cpu = true;
  ASSERT_OK_AND_ASSIGN(FullParamsScope full, model->SummonFullParams(options));
  {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_TRUE(parameter.is_cpu());
      at::Tensor(parameter).fill_(3);
    }
  }
  ASSERT_OK(full.Close());
  for (const TensorRange& named : model->Ranges()) {
    EXPECT_TRUE(named.values.is_cuda()) << named.name;
    EXPECT_TRUE((named.values == 3).all().item<bool>()) << named.name;
  }
}

TEST(CudaOffloadTest, SteppedOnTheHostHasTheBitsOfAnOptimizerOnTheCpu) {
  ASSERT_OK_AND_ASSIGN(const auto different,
                       DifferencesFromStepsOnTheCpu(Gpu()));
  EXPECT_THAT(different, IsEmpty());
}

}  // namespace
}  // namespace fsdp::testing
