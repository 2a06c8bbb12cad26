// Several optimizers of one model whose states are offloaded.
#include <torch/optim/adamw.h>

#include <cstdlib>
#include <filesystem>

#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::testing {
namespace {

using Model = FullyShardedDataParallel<NetImpl>;
using torch::optim::AdamWOptions;

constexpr int64_t kDim = 6;
constexpr int kRanks = 2;
constexpr int kSteps = 4;

std::string EmptyDirectory() {
  const auto path =
      std::filesystem::path(std::getenv("TEST_TMPDIR")) /
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
  std::filesystem::create_directories(path);
  return path;
}

at::Tensor RowsOf(int step, int rank) {
  return Rows(int64_t{3} * (step * kRanks + rank), 3, kDim);
}

absl::Status Backward(Model& model, int step) {
  const at::Tensor x = RowsOf(step, model->communicator().rank());
  return model->Backward(Loss(model->forward(x), x));
}

struct Split {
  std::vector<at::Tensor> weights, biases;
};

Split SplitOf(const Model& model) {
  Split split;
  for (const TensorRange& named : model->Ranges()) {
    (named.sizes.size() > 1 ? split.weights : split.biases)
        .push_back(named.values);
  }
  return split;
}

// Trains in one process with all ranks' data.
std::shared_ptr<NetImpl> TrainPlain() {
  const std::shared_ptr<NetImpl> net = MakeNet(kDim, 2);
  Split split;
  for (const at::Tensor& p : net->parameters()) {
    (p.dim() > 1 ? split.weights : split.biases).push_back(p);
  }
  torch::optim::AdamW first(split.weights, AdamWOptions(1e-2));
  torch::optim::AdamW second(split.biases, AdamWOptions(3e-3));
  for (int step = 0; step < kSteps; ++step) {
    net->zero_grad();
    for (int rank = 0; rank < kRanks; ++rank) {
      const at::Tensor x = RowsOf(step, rank);
      (Loss(net->forward(x), x) / kRanks).backward();
    }
    first.step();
    second.step();
  }
  return net;
}

class OffloadOptimizersTest : public ::testing::TestWithParam<Tier> {};

// Biases lie between weights, so each optimizer has parts of each shard; on
// rank 1 one may begin where the other does on rank 0.
TEST_P(OffloadOptimizersTest, OverDisjointParametersTrainAsInOneProcess) {
  const std::shared_ptr<NetImpl> plain = TrainPlain();
  const std::string directory = EmptyDirectory();
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.offload.optimizer = GetParam();
    options.offload.directory = directory;
    FSDP_ASSIGN_OR_RETURN(
        Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), options));
    const Split split = SplitOf(model);
    FusedAdamW first(split.weights, AdamWOptions(1e-2));
    FusedAdamW second(split.biases, AdamWOptions(3e-3));
    for (int step = 0; step < kSteps; ++step) {
      model->zero_grad();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      FSDP_RETURN_IF_ERROR(TorchToStatus("first", [&] { first.step(); }));
      FSDP_RETURN_IF_ERROR(TorchToStatus("second", [&] { second.step(); }));
    }
    return CheckShards(*model, *plain);
  }));
}

INSTANTIATE_TEST_SUITE_P(Tiers, OffloadOptimizersTest,
                         ::testing::Values(Tier::kCpu, Tier::kSsd),
                         [](const auto& info) {
                           return std::string(ToString(info.param));
                         });

// With kept files, one step() is one step of the run.
TEST(OffloadOptimizersKeepTest, ASecondOneIsRefusedOnAllRanks) {
  const std::string directory = EmptyDirectory();
  EXPECT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.offload.parameters = Tier::kSsd;
    options.offload.optimizer = Tier::kSsd;
    options.offload.directory = directory;
    options.offload.block_bytes = 4096;
    options.offload.keep = true;
    FSDP_ASSIGN_OR_RETURN(
        Model model, FullyShard(MakeNet(kDim, 2), Unowned(world), options));
    const Split split = SplitOf(model);
    auto first =
        std::make_unique<FusedAdamW>(split.weights, AdamWOptions(1e-2));
    FusedAdamW second(split.biases, AdamWOptions(3e-3));
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    FSDP_RETURN_IF_ERROR(TorchToStatus("first", [&] { first->step(); }));
    const absl::Status refused =
        TorchToStatus("second", [&] { second.step(); });
    if (!absl::IsFailedPrecondition(refused) ||
        !absl::StrContains(refused.message(),
                           "another optimizer has stepped this model")) {
      return absl::InternalError(refused.ToString());
    }
    FSDP_RETURN_IF_ERROR(TorchToStatus("first", [&] { first->step(); }));
    first.reset();
    return TorchToStatus("second", [&] { second.step(); });
  }));
}

}  // namespace
}  // namespace fsdp::testing
