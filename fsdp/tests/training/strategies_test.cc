// Every sharding strategy has the collectives that it promises;
// KnownProgramTest trains by it.

#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr int64_t kUnits = kBlocks + 1;

struct Counts {
  int64_t gathers;
  int64_t reduce_scatters;
  int64_t all_reduces;
};

absl::Status CheckCounts(const CollectiveLog& log, const Counts& expected) {
  const Counts actual{log.TotalsOf(Collective::kAllGather).count,
                      log.TotalsOf(Collective::kReduceScatter).count,
                      log.TotalsOf(Collective::kAllReduce).count};
  return Check(
      actual.gathers == expected.gathers &&
          actual.reduce_scatters == expected.reduce_scatters &&
          actual.all_reduces == expected.all_reduces,
      absl::StrCat(actual.gathers, " all-gathers, ", actual.reduce_scatters,
                   " reduce-scatters, ", actual.all_reduces, " all-reduces"));
}

absl::Status Backward(FullyShardedDataParallel<NetImpl>& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 4, kDim);
  return model->Backward(Loss(model->forward(x), x));
}

struct CountsCase {
  const char* name;
  ShardingStrategy strategy;
  int no_sync_backwards;  // before the one that reduces
  Counts expected;
};

class CountsTest : public ::testing::TestWithParam<CountsCase> {};

TEST_P(CountsTest, OfAStep) {
  const CountsCase& c = GetParam();
  RecordedRanks ranks(4);
  const auto run = [&](Communicator& world) -> absl::Status {
    CollectiveLog& log = ranks.logs[world.rank()];
    FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
    Options options = BlockUnits();
    options.unit.strategy = c.strategy;
    options.checks.order = false;
    FSDP_ASSIGN_OR_RETURN(auto model,
                          FullyShard(MakeNet(kDim, kBlocks), mesh, options));
    for (int step = 0; step < 3; ++step) {
      log.Clear();
      for (int i = 0; i < c.no_sync_backwards; ++i) {
        NoSyncScope no_sync = model->NoSync();
        FSDP_RETURN_IF_ERROR(Backward(model));
      }
      FSDP_RETURN_IF_ERROR(Backward(model));
    }
    if (c.strategy == ShardingStrategy::kHybridShard) {
      // Only what a rank has reduced.
      EXPECT_EQ(log.TotalsOf(Collective::kReduceScatter).bytes,
                2 * log.TotalsOf(Collective::kAllReduce).bytes);
    }
    return CheckCounts(log, c.expected);
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

using S = ShardingStrategy;

INSTANTIATE_TEST_SUITE_P(
    All, CountsTest,
    ::testing::Values(
        CountsCase{"FullShard", S::kFullShard, 0, {2 * kUnits - 1, kUnits, 0}},
        CountsCase{"FullShardNoSync",
                   S::kFullShard,
                   2,
                   {3 * (2 * kUnits - 1), kUnits, 0}},
        CountsCase{"ShardGradOp", S::kShardGradOp, 0, {kUnits, kUnits, 0}},
        CountsCase{
            "ShardGradOpNoSync", S::kShardGradOp, 2, {3 * kUnits, kUnits, 0}},
        CountsCase{
            "ShardOptimizerNoSync", S::kShardOptimizer, 2, {kUnits, kUnits, 0}},
        CountsCase{"NoShard", S::kNoShard, 0, {0, 0, kUnits}},
        CountsCase{"NoShardNoSync", S::kNoShard, 2, {0, 0, kUnits}},
        CountsCase{
            "Hybrid", S::kHybridShard, 0, {2 * kUnits - 1, kUnits, kUnits}}),
    [](const auto& info) { return std::string(info.param.name); });

class WithoutAllToAll final : public comm::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  bool HasAllToAll() const override { return false; }
};

TEST(OptionsTest, QuantizedSumsAreRefusedWhereThereIsNoAllToAll) {
  for (const bool reduce : {false, true}) {
    const absl::Status status =
        RunAllRanks(2, [&](Communicator& world) -> absl::Status {
          Options options;
          options.quantize.gather = true;
          options.quantize.reduce = reduce;
          return FullyShard(MakeNet(kDim, 1),
                            std::make_shared<WithoutAllToAll>(Unowned(world)),
                            options)
              .status();
        });
    if (!reduce) {
      EXPECT_OK(status);
    } else {
      EXPECT_THAT(status.message(), HasSubstr("has no all-to-all"));
    }
  }
}

TEST(IgnoreTest, IgnoredModulesAndParametersStayAsTheyAreOnEachRank) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    auto net = MakeNet(kDim, 2, /*seed=*/world.rank());
    const at::Tensor block = net->blocks->parameters().front();
    const at::Tensor bias = net->head->bias;
    const at::Tensor before = block.detach().clone();
    Options options = BlockUnits();
    options.ignore.module = [](const std::string& path,
                               const torch::nn::Module&) {
      return path == "blocks.0";
    };
    options.ignore.parameter = [](const std::string& name, const at::Tensor&) {
      return name == "head.bias";
    };
    FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, Unowned(world), options));
    for (const TensorRange& shard : model->Ranges()) {
      EXPECT_TRUE(shard.name != "head.bias" &&
                  shard.name != "blocks.0.fc.weight")
          << shard.name;
    }
    FSDP_RETURN_IF_ERROR(Backward(model));
    EXPECT_TRUE(block.grad().defined() && bias.grad().defined());
    return CheckTensor(block, before, "ignored block");
  }));
}

struct Refusal {
  const char* text;
  void (*spoil)(Options& options, int rank);
  int ranks = 2;
};

const Refusal kRefusals[] = {
    {"backward_group_size is 0: leave it unset",
     [](Options& options, int) { options.unit.backward_group_size = 0; }},
    {"Options::timeout is 0: leave it unset",
     [](Options& options, int) { options.timeout = absl::ZeroDuration(); }},
    {"offload: memory_budget is 0, which is not positive: leave it unset",
     [](Options& options, int) { options.offload.memory_budget = 0; }},
    {"Options::gradients: what gradients are divided by has to be positive",
     [](Options& options, int) { options.gradients.divide_factor = 0; }},
    {"a mesh of two dimensions",
     [](Options& options, int) {
       options.unit.strategy = ShardingStrategy::kHybridShard;
     }},
    {"does not divide the 3 ranks",
     [](Options& options, int) { options.unit.backward_group_size = 2; }, 3},
    {"no gather for backward",
     [](Options& options, int) {
       options.unit.strategy = ShardingStrategy::kShardGradOp;
       options.unit.backward_group_size = 2;
     }},
    {"a block of 0 numbers",
     [](Options& options, int rank) {
       options.quantize.reduce = true;
       options.quantize.block = rank;
     }},
    {"gathers in blocks of 64",
     [](Options& options, int rank) {
       options.quantize.gather = true;
       options.quantize.block = 32 + 32 * rank;
     }},
};

TEST(OptionsTest, WhatMakesNoSenseIsRefusedByAllRanks) {
  for (const Refusal& refusal : kRefusals) {
    const auto run = [&](Communicator& world) {
      Options options;
      refusal.spoil(options, world.rank());
      return FullyShard(MakeNet(kDim, 1), Unowned(world), options).status();
    };
    EXPECT_THAT(RunRanks(refusal.ranks, run),
                AllRefuse(refusal.text, Code::kInvalidArgument));
  }
}

}  // namespace
}  // namespace fsdp::testing
