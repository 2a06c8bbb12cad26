// The sharded model says of itself what was planned before sharding.
#include "planner/choose/planned_model.h"

#include <ostream>

#include "fsdp/deferred/deferred_init.h"
#include "fsdp/model/forward.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 131;  // a prime: everything is padded
constexpr int kBlocks = 8;

struct Case {
  const char* name;
  std::function<void(Options&)> choose;
  std::function<void(NetImpl&)> change = [](NetImpl&) {};
  int rows_of_mesh = 0;  // 0: one dimension
  // Bytes of all ranks that may stay in memory; 0: nothing rests in files.
  int64_t in_files = 0;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

absl::StatusOr<comm::Mesh> MeshOf(const Case& c, Communicator& ranks) {
  if (c.rows_of_mesh == 0) {
    return comm::Mesh::Create(Unowned(ranks), {{"shard", -1}});
  }
  return comm::Mesh::Create(Unowned(ranks),
                            {{"replicate", c.rows_of_mesh}, {"shard", -1}});
}

void ToFiles(Options& options, int64_t budget) {
  OffloadOptions& offload = options.offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
  offload.directory = ::testing::TempDir();
  offload.memory_budget = budget;
}

absl::Status Compare(const Case& c, Communicator& ranks, int backwards) {
  std::shared_ptr<NetImpl> net;
  {
    const DeferredInit deferred;
    net = std::make_shared<NetImpl>(kDim, kBlocks);
    c.change(*net);
  }
  Options options = BlockUnits();
  c.choose(options);
  if (c.in_files > 0) {
    ToFiles(options, c.in_files / ranks.world_size() + (200 << 10));
  }
  FSDP_ASSIGN_OR_RETURN(const comm::Mesh mesh, MeshOf(c, ranks));
  MemoryPlanOptions of_step;
  of_step.backwards_per_step = backwards;
  MemoryPlan planned;
  {
    FSDP_ASSIGN_OR_RETURN(const ShardPlan plan,
                          PlanSharding(net, mesh, options));
    FSDP_ASSIGN_OR_RETURN(const PlannedModel model,
                          PlanModel(plan, mesh, options));
    planned = model.PlanMemory(of_step);
  }
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(net, mesh, options));
  const MemoryPlan sharded = model->PlanMemory(of_step);
  EXPECT_EQ(planned.ToString(), sharded.ToString());
  EXPECT_EQ(planned.total(), sharded.total());
  return absl::OkStatus();
}

class PlannedModelTest : public ::testing::TestWithParam<Case> {};

TEST_P(PlannedModelTest, IsWhatFullyShardMakes) {
  const Case& c = GetParam();
  for (const int ranks : {1, 2, 3, 5, 8}) {
    if (c.rows_of_mesh > 0 && ranks % c.rows_of_mesh != 0) continue;
    for (const int backwards : {1, 3}) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", backwards, " backwards"));
      EXPECT_OK(RunAllRanks(ranks, [&](Communicator& communicator) {
        return Compare(c, communicator, backwards);
      }));
    }
  }
}

const auto kNothing = [](Options&) {};

INSTANTIATE_TEST_SUITE_P(
    All, PlannedModelTest,
    ::testing::Values(
        Case{"FullShard", kNothing},
        Case{"WithoutPrefetch",
             [](Options& o) {
               o.prefetch = {false, false};
             }},
        Case{"ShardGradOp",
             [](Options& o) {
               o.unit.strategy = ShardingStrategy::kShardGradOp;
             }},
        Case{"ShardOptimizer",
             [](Options& o) {
               o.unit.strategy = ShardingStrategy::kShardOptimizer;
             }},
        Case{"NoShard",
             [](Options& o) { o.unit.strategy = ShardingStrategy::kNoShard; }},
        Case{"Hybrid",
             [](Options& o) {
               o.unit.strategy = ShardingStrategy::kHybridShard;
             },
             [](NetImpl&) {}, 2},
        Case{"HybridGradOp",
             [](Options& o) {
               o.unit.strategy = ShardingStrategy::kHybridShardGradOp;
             },
             [](NetImpl&) {}, 2},
        Case{"OneUnit", [](Options& o) { o.wrap_policy = nullptr; }},
        Case{"NestedUnits",
             [](Options& o) {
               o.wrap_policy = WrapModules<BlockImpl, torch::nn::LinearImpl>();
             }},
        Case{"WithoutSharedMemory", [](Options& o) { o.share_memory = false; }},
        Case{"RootIsFreed",
             [](Options& o) { o.reshard_root_after_forward = true; }},
        Case{"PartsForBackward",
             [](Options& o) { o.unit.backward_group_size = 1; }},
        Case{"InBf16",
             [](Options& o) { o.unit.precision = ComputeIn(at::kBFloat16); }},
        Case{"ReducedInBf16",
             [](Options& o) {
               o.unit.precision = ComputeIn(at::kBFloat16);
               o.unit.precision.reduce_dtype = at::kBFloat16;
               o.unit.precision.keep_low_precision_grads = true;
             }},
        Case{"DividedByTwo", [](Options& o) { o.gradients.divide_factor = 2; }},
        Case{"Frozen", kNothing,
             [](NetImpl& net) {
               for (const at::Tensor& p : net.blocks->parameters()) {
                 p.set_requires_grad(false);
               }
             }},
        Case{"PartlyFrozen", kNothing,
             [](NetImpl& net) {
               for (const auto& block : *net.blocks) {
                 block->as<BlockImpl>()->fc->weight.set_requires_grad(false);
               }
             }},
        Case{"TwoDtypes", kNothing,
             [](NetImpl& net) {
               net.blocks[1]->as<BlockImpl>()->fc->to(at::kDouble);
             }},
        Case{"Tied", kNothing,
             [](NetImpl& net) {
               EXPECT_OK(Tie(net.embed->weight, net.head->weight));
             }},
        Case{"TiedAcrossUnits", kNothing,
             [](NetImpl& net) {
               EXPECT_OK(Tie(net.blocks[0]->as<BlockImpl>()->fc->weight,
                             net.blocks[2]->as<BlockImpl>()->fc->weight));
             }},
        Case{"InFilesWithRoom", kNothing, [](NetImpl&) {}, 0, int64_t{1} << 30},
        Case{"PartlyInFiles", kNothing, [](NetImpl&) {}, 0, 4200 << 10},
        Case{"PartlyInFilesInBf16",
             [](Options& o) { o.unit.precision = ComputeIn(at::kBFloat16); },
             [](NetImpl&) {}, 0, 4200 << 10}),
    [](const ::testing::TestParamInfo<Case>& info) {
      return std::string(info.param.name);
    });

}  // namespace
}  // namespace fsdp::testing
