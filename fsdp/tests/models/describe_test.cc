#include "fsdp/options/options.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::testing::Ge;

constexpr int64_t kDim = 17;
constexpr int kBlocks = 5;

absl::Status Step(FullyShardedDataParallel<NetImpl>& model) {
  const at::Tensor x = Rows(0, 4, kDim);
  return model->Backward(Loss(model->forward(x).to(at::kFloat), x));
}

absl::Status CheckEqual(const char* what, int64_t actual, int64_t expected) {
  return Check(actual == expected,
               absl::StrCat(what, ": ", actual, ", planned ", expected));
}

struct Case {
  const char* name;
  ShardingStrategy strategy;
  bool mixed;
  int backwards;
};

class PlanTest : public ::testing::TestWithParam<Case> {};

TEST_P(PlanTest, MeasuredPeaksAreThePlannedOnes) {
  const Case& c = GetParam();
  EXPECT_OK(RunAllRanks(3, [&](Communicator& communicator) -> absl::Status {
    Options options = BlockUnits();
    options.unit.strategy = c.strategy;
    if (c.mixed) options.unit.precision = ComputeIn(at::kBFloat16);
    FSDP_ASSIGN_OR_RETURN(
        auto model,
        FullyShard(MakeNet(kDim, kBlocks), Unowned(communicator), options));
    MemoryPlanOptions plan_options;
    plan_options.backwards_per_step = c.backwards;
    const MemoryPlan plan = model->PlanMemory(plan_options);
    for (int step = 0; step < 2; ++step) {
      for (int i = 1; i < c.backwards; ++i) {
        NoSyncScope no_sync = model->NoSync();
        FSDP_RETURN_IF_ERROR(Step(model));
      }
      FSDP_RETURN_IF_ERROR(Step(model));
    }
    int64_t shards = 0;
    int64_t gradients = 0;
    for (const TensorRange& named : model->Ranges()) {
      shards += named.values.nbytes();
      gradients += named.values.grad().nbytes();
    }
    const MemoryStats stats = model->memory_stats();
    FSDP_RETURN_IF_ERROR(CheckEqual(
        "gathered", stats.parameters.peak_in_use_bytes, plan.gathered));
    FSDP_RETURN_IF_ERROR(CheckEqual(
        "in flight", stats.gradients.peak_in_use_bytes, plan.in_flight));
    // Alignment belongs to shards, too.
    FSDP_RETURN_IF_ERROR(CheckThat(plan.shards,
                                   AllOf(Ge(shards), Le(shards + shards / 10)),
                                   "planned bytes of shards"));
    // So do flags to gradients.
    return CheckThat(plan.gradients,
                     AllOf(Ge(gradients), Le(plan.shards + plan.shards / 10)),
                     "planned bytes of gradients");
  }));
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanTest,
    ::testing::Values(
        Case{"FullShard", ShardingStrategy::kFullShard, false, 1},
        Case{"FullShardInBf16", ShardingStrategy::kFullShard, true, 1},
        Case{"FullShardAccumulating", ShardingStrategy::kFullShard, false, 3},
        Case{"ShardGradOp", ShardingStrategy::kShardGradOp, false, 1},
        Case{"ShardOptimizer", ShardingStrategy::kShardOptimizer, false, 2},
        Case{"NoShard", ShardingStrategy::kNoShard, false, 1},
        Case{"NoShardInBf16", ShardingStrategy::kNoShard, true, 1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(DescribeTest, ShowsUnitsStrategiesDtypesAndMemory) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.configure_unit = [](const std::string& path,
                                const torch::nn::Module&, UnitOptions& unit) {
      if (path == "blocks.1") unit.strategy = ShardingStrategy::kShardGradOp;
    };
    auto net = MakeNet(kDim, 2);
    for (at::Tensor& p : net->blocks->parameters()) p.set_requires_grad(false);
    FSDP_ASSIGN_OR_RETURN(
        auto model, FullyShard(std::move(net), Unowned(communicator), options));
    const std::string text = model->Describe();
    for (const char* part :
         {"root", "\n  blocks.0", "full shard", "shard gradients and optimizer",
          "fp32/bf16/fp32", "frozen", "gathered units"}) {
      if (!absl::StrContains(text, part)) {
        return absl::InternalError(absl::StrCat(part, " is not in\n", text));
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
