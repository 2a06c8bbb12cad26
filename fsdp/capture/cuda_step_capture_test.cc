// Captured steps on a GPU have the bits of eager steps, and a model trains on
// after a failed capture. Needs a GPU.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/rand_like.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "base/device_graph.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/wrappers/paired_communicator.h"
#include "fsdp/capture/step_capture.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/toy_model.h"

namespace fsdp {
namespace {

using ::fsdp::testing::BlockUnits;
using ::fsdp::testing::Loss;
using ::fsdp::testing::MakeNet;
using ::fsdp::testing::NetImpl;
using ::fsdp::testing::Rows;

using Model = FullyShardedDataParallel<NetImpl>;
using World = std::shared_ptr<comm::Communicator>;

constexpr int64_t kDim = 8;
constexpr int kSteps = 8;
const c10::Device kGpu(c10::kCUDA, 0);

absl::StatusOr<World> LoopbackOf(int world_size) {
  comm::LoopbackOptions loopback;
  loopback.place = {world_size / 2, world_size};
  loopback.device = kGpu;
  return comm::CreateLoopback(loopback);
}

absl::StatusOr<World> OneRankOfNccl() {
  FSDP_ASSIGN_OR_RETURN(auto device,
                        comm::CreateNcclCommunicator(
                            c10::make_intrusive<c10d::HashStore>(), 0, 1));
  FSDP_ASSIGN_OR_RETURN(auto host, comm::CreateLoopback({}));
  return comm::CreatePairedCommunicator(std::move(host), std::move(device));
}

struct Training {
  Model model{nullptr};
  std::unique_ptr<FusedAdamW> optimizer;

  // Sets a learning rate that is a float and differs in every step.
  void SetRate(int i) {
    optimizer->param_groups()[0].options().set_lr(
        static_cast<float>(1e-2 / (1 + i)));
  }
};

absl::StatusOr<Training> Start(const World& world, const Options& options) {
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, /*num_blocks=*/3);
  net->to(kGpu);
  Training training;
  FSDP_ASSIGN_OR_RETURN(training.model, FullyShard(net, world, options));
  training.optimizer =
      std::make_unique<FusedAdamW>(training.model->Parameters());
  return training;
}

absl::StatusOr<at::Tensor> TrainStep(Training& training, const at::Tensor& x) {
  // This also draws from the GPU's generator.
  const at::Tensor noisy = x + 0.1 * at::rand_like(x);
  at::Tensor loss = Loss(training.model->forward(noisy), x);
  FSDP_RETURN_IF_ERROR(training.model->Backward(loss));
  FSDP_RETURN_IF_ERROR(training.model->ClipGradNorm(0.1).status());
  training.optimizer->step();
  training.optimizer->zero_grad();
  return loss;
}

at::Tensor Batch(int i) { return Rows(int64_t{3} * i, 3, kDim).to(kGpu); }

absl::StatusOr<std::unique_ptr<CapturedStep>> Capture(Training& training) {
  CaptureOptions options;
  options.make_graph = MakeCudaGraph;
  return CapturedStep::Make(
      *training.model, *training.optimizer,
      [&](const CapturedStep::Inputs& in) {
        return TrainStep(training, in[0]);
      },
      options);
}

void ExpectTheBitsOfStepsThatRun(const World& world, const Options& options) {
  ASSERT_OK_AND_ASSIGN(Training captured, Start(world, options));
  ASSERT_OK_AND_ASSIGN(const auto step, Capture(captured));
  std::vector<at::Tensor> actual;
  at::manual_seed(1);
  for (int i = 0; i < kSteps; ++i) {
    captured.SetRate(i);
    ASSERT_OK_AND_ASSIGN(const at::Tensor loss, step->Run({Batch(i)}));
    actual.push_back(loss.clone());
  }
  EXPECT_EQ(step->replays(), kSteps - 3);
  ASSERT_OK_AND_ASSIGN(Training eager, Start(world, options));
  at::manual_seed(1);
  for (int i = 0; i < kSteps; ++i) {
    eager.SetRate(i);
    ASSERT_OK_AND_ASSIGN(const at::Tensor loss, TrainStep(eager, Batch(i)));
    EXPECT_TRUE(at::equal(actual[i].cpu(), loss.detach().cpu())) << i;
  }
  for (size_t i = 0; i < eager.model->Ranges().size(); ++i) {
    EXPECT_TRUE(at::equal(captured.model->Ranges()[i].values.detach().cpu(),
                          eager.model->Ranges()[i].values.detach().cpu()))
        << eager.model->Ranges()[i].name;
  }
}

TEST(CudaStepCaptureTest, RanksThatAreOne) {
  for (const int world_size : {1, 2, 3}) {
    ASSERT_OK_AND_ASSIGN(const World world, LoopbackOf(world_size));
    ExpectTheBitsOfStepsThatRun(world, BlockUnits());
  }
}

TEST(CudaStepCaptureTest, InBFloat16) {
  ASSERT_OK_AND_ASSIGN(const World world, LoopbackOf(2));
  Options options = BlockUnits();
  options.unit.precision.param_dtype = at::kBFloat16;
  ExpectTheBitsOfStepsThatRun(world, options);
}

TEST(CudaStepCaptureTest, OverNccl) {
  ASSERT_OK_AND_ASSIGN(const World world, OneRankOfNccl());
  Options options = BlockUnits();
  options.unit.precision.param_dtype = at::kBFloat16;
  ExpectTheBitsOfStepsThatRun(world, options);
}

TEST(CudaStepCaptureTest, ACaptureThatFailsLeavesModelAndGeneratorUsable) {
  ASSERT_OK_AND_ASSIGN(const World world, LoopbackOf(2));
  ASSERT_OK_AND_ASSIGN(Training training, Start(world, BlockUnits()));
  CaptureOptions options;
  options.make_graph = MakeCudaGraph;
  ASSERT_OK_AND_ASSIGN(
      const auto step,
      CapturedStep::Make(
          *training.model, *training.optimizer,
          [&](const CapturedStep::Inputs& in) -> absl::StatusOr<at::Tensor> {
            FSDP_ASSIGN_OR_RETURN(at::Tensor loss, TrainStep(training, in[0]));
            (void)loss.item<float>();
            return loss;
          },
          options));
  for (int i = 0; i < 3; ++i) ASSERT_OK(step->Run({Batch(i)}).status());
  EXPECT_THAT(step->Run({Batch(3)}).status().message(),
              ::testing::HasSubstr("the capture of a step"));
  for (int i = 3; i < 6; ++i) {
    ASSERT_OK_AND_ASSIGN(const at::Tensor loss, TrainStep(training, Batch(i)));
    EXPECT_TRUE(loss.isfinite().item<bool>());
  }
  EXPECT_EQ(at::rand({4}, at::TensorOptions(kGpu)).cpu().numel(), 4);
}

// The code of the user guide.
absl::Status Train(Model& model, fsdp::FusedAdamW& optimizer,
                   const std::vector<at::Tensor>& batches) {
  // clang-format off
fsdp::CaptureOptions options;
options.make_graph = fsdp::MakeCudaGraph;  // in //base:cuda_graph
FSDP_ASSIGN_OR_RETURN(
    const std::unique_ptr<fsdp::CapturedStep> step,
    fsdp::CapturedStep::Make(
        *model, optimizer,
        [&](const std::vector<at::Tensor>& in) -> absl::StatusOr<at::Tensor> {
          at::Tensor loss = Loss(model->forward(in[0]), in[0]);
          FSDP_RETURN_IF_ERROR(model->Backward(loss));
          FSDP_RETURN_IF_ERROR(model->ClipGradNorm(1.0).status());
          optimizer.step();
          optimizer.zero_grad();
          return loss;
        },
        options));
for (const at::Tensor& batch : batches) {
  FSDP_ASSIGN_OR_RETURN(const at::Tensor loss, step->Run({batch}));
}
  // clang-format on
  return absl::OkStatus();
}

TEST(CudaStepCaptureTest, WhatTheGuideShows) {
  ASSERT_OK_AND_ASSIGN(const World world, LoopbackOf(1));
  ASSERT_OK_AND_ASSIGN(Training training, Start(world, BlockUnits()));
  std::vector<at::Tensor> batches;
  batches.reserve(kSteps);
  for (int i = 0; i < kSteps; ++i) batches.push_back(Batch(i));
  EXPECT_OK(Train(training.model, *training.optimizer, batches));
}

}  // namespace
}  // namespace fsdp
