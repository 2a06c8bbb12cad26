// The library does with a model what the simulator says of it.
#include <ATen/ops/randint.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <utility>

#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/mesh.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "planner/simulator/simulator.h"
#include "testing/gpt/model.h"

namespace fsdp::simulator {
namespace {

constexpr int64_t kVocab = 31;
constexpr int64_t kDim = 12;
constexpr int64_t kLayers = 3;
constexpr int64_t kSeq = 7;

struct Case {
  const char* name;
  int ranks;
  int shard_ranks;  // 0: all
  Strategy strategy;
  ShardingStrategy of_library;
  bool bf16;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

Scenario ScenarioOf(const Case& c) {
  GptShape gpt;
  gpt.vocab = kVocab;
  gpt.dim = kDim;
  gpt.layers = kLayers;
  gpt.seq = kSeq;
  Scenario scenario;
  scenario.model = *MakeGpt(gpt);
  scenario.sharding.ranks = c.ranks;
  scenario.sharding.shard_ranks = c.shard_ranks;
  scenario.sharding.strategy = c.strategy;
  if (c.bf16) {
    scenario.sharding.compute_bytes = scenario.sharding.reduce_bytes = 2;
  }
  scenario.costs.flops_per_second = scenario.costs.memory_bandwidth = 1;
  scenario.costs.host = {1, 1};
  return scenario;
}

using Model = FullyShardedDataParallel<gpt::GptImpl>;

absl::StatusOr<Model> ShardGpt(const Case& c, comm::CollectiveLog* log,
                               comm::Communicator& communicator) {
  Options options;
  options.wrap_policy = WrapModules<gpt::BlockImpl>();
  options.unit.strategy = c.of_library;
  options.checks.order = false;
  if (c.bf16) options.unit.precision = ComputeIn(at::kBFloat16);
  if (c.bf16) options.unit.precision.reduce_dtype = at::kBFloat16;
  gpt::GptConfig config;
  config.vocab = kVocab;
  config.dim = kDim;
  config.layers = kLayers;
  config.heads = 2;
  config.seq = kSeq;
  // The library takes this group with it.
  FSDP_ASSIGN_OR_RETURN(auto group, communicator.Split(0, communicator.rank()));
  std::shared_ptr<comm::Communicator> ranks =
      comm::Record(std::move(group), log);
  auto net = std::make_shared<gpt::GptImpl>(config);
  if (c.shard_ranks == 0) return FullyShard(net, ranks, options);
  FSDP_ASSIGN_OR_RETURN(
      comm::Mesh mesh,
      comm::Mesh::Create(ranks, {{"replicate", -1}, {"shard", c.shard_ranks}}));
  return FullyShard(net, mesh, options);
}

absl::Status Step(Model& model) {
  const at::Tensor tokens = at::randint(kVocab, {1, kSeq}, at::kLong);
  return model->Backward(
      gpt::NextTokenLoss(model->forward(tokens).to(at::kFloat), tokens));
}

// Bytes of collectives by kind, of whole tensors.
struct Volumes {
  int64_t gathered = 0;
  int64_t reduced = 0;
  int64_t replicated = 0;
};

Volumes VolumesOf(const comm::CollectiveLog& log, int64_t divisor) {
  const auto bytes = [&](comm::Collective collective) {
    return log.TotalsOf(collective).bytes / divisor;
  };
  return {bytes(comm::Collective::kAllGather),
          bytes(comm::Collective::kReduceScatter),
          bytes(comm::Collective::kAllReduce)};
}

// Returns the same from what the simulated rank sends.
Volumes VolumesOf(const ShardedShape& sharded, const StepResult& step) {
  const int64_t shard = sharded.shard.size;
  Volumes volumes;
  if (shard > 1) {
    volumes.gathered = step.total.gathered_bytes / (shard - 1) * shard;
    volumes.reduced = step.total.reduced_bytes / (shard - 1) * shard;
  }
  if (sharded.replicate.size == 1) return volumes;
  for (const UnitMessages& unit : sharded.messages) {
    volumes.replicated += unit.segment;
  }
  return volumes;
}

class LibraryTest : public ::testing::TestWithParam<Case> {};

TEST_P(LibraryTest, PlansTheSameMemoryAndMovesTheSameBytes) {
  const Case& c = GetParam();
  const Scenario scenario = ScenarioOf(c);
  ASSERT_OK_AND_ASSIGN(const ShardedShape sharded,
                       Shard(scenario.model, scenario.sharding));
  ASSERT_OK_AND_ASSIGN(const StepResult step, Simulate(scenario));
  comm::CollectiveLog log;
  MemoryPlan plan;
  ASSERT_OK(comm::testing::RunAllRanks(
      c.ranks, [&](comm::Communicator& communicator) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(Model model, ShardGpt(c, &log, communicator));
        if (communicator.rank() == 0) plan = model->PlanMemory();
        FSDP_RETURN_IF_ERROR(Step(model));
        FSDP_ASSIGN_OR_RETURN(auto fence, communicator.Split(0, 0));
        if (communicator.rank() == 0) log.Clear();
        FSDP_ASSIGN_OR_RETURN(fence, communicator.Split(0, 0));
        return Step(model);
      }));
  EXPECT_EQ(step.peak.ToString(), plan.ToString());
  EXPECT_EQ(step.peak.total(), plan.total());
  const Volumes simulated = VolumesOf(sharded, step);
  const Volumes recorded = VolumesOf(log, c.ranks);
  EXPECT_EQ(simulated.gathered, recorded.gathered);
  EXPECT_EQ(simulated.reduced, recorded.reduced);
  EXPECT_EQ(simulated.replicated, recorded.replicated);
}

INSTANTIATE_TEST_SUITE_P(
    Cases, LibraryTest,
    ::testing::Values(Case{"OneRank", 1, 0, Strategy::kFull,
                           ShardingStrategy::kFullShard, false},
                      Case{"TwoRanks", 2, 0, Strategy::kFull,
                           ShardingStrategy::kFullShard, false},
                      Case{"ThreeRanksInBf16", 3, 0, Strategy::kFull,
                           ShardingStrategy::kFullShard, true},
                      Case{"FiveRanksKeptAfterForward", 5, 0,
                           Strategy::kGradients, ShardingStrategy::kShardGradOp,
                           false},
                      Case{"ThreeRanksOptimizer", 3, 0, Strategy::kOptimizer,
                           ShardingStrategy::kShardOptimizer, false},
                      Case{"ThreeRanksReplicated", 3, 0, Strategy::kReplicated,
                           ShardingStrategy::kNoShard, false},
                      Case{"FourRanksHybrid", 4, 2, Strategy::kFull,
                           ShardingStrategy::kHybridShard, false}),
    [](const ::testing::TestParamInfo<Case>& info) {
      return std::string(info.param.name);
    });

}  // namespace
}  // namespace fsdp::simulator
