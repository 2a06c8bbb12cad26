// Gradients over several backwards, with and without NoSync(), their factors
// and hooks. KnownProgramTest has many orders of such backwards.
#include <torch/optim/sgd.h>

#include <stdexcept>

#include "fsdp/testing/gradient_check.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;
using Started = absl::StatusOr<std::unique_ptr<comm::Work>>;

absl::StatusOr<Model> MakeModel(Communicator& world) {
  return FullyShard(MakeNet(kDim, 2), Unowned(world), BlockUnits());
}

at::Tensor LossOn(const Forwarding& forward, int turn, int rank) {
  const at::Tensor x = InputOf(rank, Rows(int64_t{2} * turn, 2, kDim));
  return Loss(forward(x), x);
}

// Runs backwards, of which the first has the number `turn`: 'S' synchronizes,
// 'N' does not.
absl::Status RunTurns(Model& model, const std::string& text, int turn = 0) {
  for (const char c : text) {
    std::optional<NoSyncScope> no_sync;
    if (c == 'N') no_sync.emplace(model->NoSync());
    FSDP_RETURN_IF_ERROR(model->Backward(
        LossOn([&](const at::Tensor& x) { return model->forward(x); }, turn++,
               model->communicator().rank())));
  }
  return absl::OkStatus();
}

// Checks that gradients are those of the first backwards with plain LibTorch.
absl::Status CheckSumOf(Model& model, int backwards, double factor = 1) {
  std::vector<std::shared_ptr<NetImpl>> nets;
  for (int rank = 0; rank < model->communicator().world_size(); ++rank) {
    const auto net = nets.emplace_back(MakeNet(kDim, 2));
    for (int turn = 0; turn < backwards; ++turn) {
      LossOn([&](const at::Tensor& x) { return net->forward(x); }, turn, rank)
          .backward();
    }
  }
  Gradients means = MeansOf(nets);
  for (auto& [name, mean] : means) mean.mul_(factor);
  return CheckOwnGradients(*model, means);
}

TEST(NoSyncTest, ScopesNest) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    {
      NoSyncScope outer = model->NoSync();
      { NoSyncScope inner = model->NoSync(); }
      FSDP_RETURN_IF_ERROR(RunTurns(model, "S"));  // not after all
    }
    FSDP_RETURN_IF_ERROR(CheckOwnGradients(*model, {}));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S", /*turn=*/1));
    return CheckSumOf(model, 2);
  }));
}

TEST(ZeroGradTest, OfAnOptimizerKeepsWhatIsWholeThatOfTheModelDropsIt) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    torch::optim::SGD optimizer(model->Parameters(), 0.1);
    FSDP_RETURN_IF_ERROR(RunTurns(model, "N"));
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S", /*turn=*/1));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NN"));
    model->zero_grad();
    EXPECT_EQ(model->memory_stats().gradients.in_use_bytes, 0);
    FSDP_RETURN_IF_ERROR(RunTurns(model, "S"));
    return CheckSumOf(model, 1);
  }));
}

TEST(DivideFactorsTest, MayChangeBetweenSteps) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(4, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NS"));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 2, 2.0 / 8));
    model->zero_grad();
    FSDP_RETURN_IF_ERROR(model->SetGradientDivideFactors(1, 2));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NS"));
    return CheckSumOf(model, 2);
  }));
}

TEST(ReductionHookTest, RunsOncePerReductionAlsoForGradientsKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    std::map<std::string, int> calls;
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks([&](const ReduceScatterCall& call) -> Started {
          ++calls[call.unit];
          return call.group.ReduceScatter(call.own, call.whole,
                                          comm::ReduceOp::kSum, call.unit);
        }));
    FSDP_RETURN_IF_ERROR(RunTurns(model, "NNS"));
    FSDP_RETURN_IF_ERROR(CheckSumOf(model, 3));
    const std::map<std::string, int> once = {
        {"root", 1}, {"blocks.0", 1}, {"blocks.1", 1}};
    return CheckThat(calls, Eq(once), "reductions of units");
  }));
}

TEST(ReductionHookTest, WhatItThrowsEndsTheBackwardWithItsText) {
  const auto run = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FSDP_RETURN_IF_ERROR(
        model->SetReductionHooks([](const ReduceScatterCall&) -> Started {
          throw std::runtime_error("my compressor");
        }));
    return RunTurns(model, "S");
  };
  EXPECT_THAT(RunRanks(2, run),
              Each(::testing::Property(&absl::Status::message,
                                       HasSubstr("my compressor"))));
}

}  // namespace
}  // namespace fsdp::testing
