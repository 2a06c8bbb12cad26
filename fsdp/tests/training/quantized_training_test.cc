// Training whose gathers and sums send int8.

#include <cmath>

#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"
#include "fsdp/tests/training/quantized_net.h"

namespace fsdp::testing::quantized_net {
namespace {

absl::StatusOr<TaskRecord> Train(Communicator& world, const Options& options,
                                 const TrainingTask& task) {
  FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(world));
  FSDP_ASSIGN_OR_RETURN(Net model,
                        FullyShard(MakeNet(kDim, kBlocks), mesh, options));
  return RunSharded(task, model);
}

// Momentum magnifies errors of one sign, so there must be none.
TrainingTask LongTraining() {
  TrainingTask task = ToyTask(kDim);
  task.steps = 30;
  task.optimizer = Sgd();
  return task;
}

absl::Status ExpectSame(Communicator& world, const Options& options,
                        const Options& expected) {
  const TrainingTask task = LongTraining();
  FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, Train(world, options, task));
  FSDP_ASSIGN_OR_RETURN(const TaskRecord record, Train(world, expected, task));
  return CheckSameRecord(actual, record, 0, 0);
}

// --- What is learned ---------------------------------------------------------

struct Setting {
  const char* name;
  bool gather;
  bool reduce;
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  bool mixed = false;
  int backwards = 1;
};

class QuantizedTrainingTest
    : public ::testing::TestWithParam<std::tuple<Setting, int>> {};

// A block's int8 step is 1/127 of its largest number, about 0.3 for parameters.
// Each training step rounds by at most half of it, up as often as down, so that
// errors grow with the square root of the number of steps.
constexpr double kRelative = 0.03;
const double kAbsolute = 0.3 / 127 / 2 * std::sqrt(LongTraining().steps);

TEST_P(QuantizedTrainingTest, ConvergesAsExactTrainingDoes) {
  const auto& [setting, world_size] = GetParam();
  EXPECT_OK(RunAllRanks(
      world_size, [&, &setting = setting](Communicator& world) -> absl::Status {
        TrainingTask task = LongTraining();
        task.backwards = setting.backwards;
        Options options = BlockUnits();
        options.unit.strategy = setting.strategy;
        if (setting.mixed) options.unit.precision = ComputeIn(at::kBFloat16);
        FSDP_ASSIGN_OR_RETURN(const TaskRecord exact,
                              Train(world, options, task));
        options.quantize = Both();
        options.quantize.gather = setting.gather;
        options.quantize.reduce = setting.reduce;
        FSDP_ASSIGN_OR_RETURN(const TaskRecord actual,
                              Train(world, options, task));
        FSDP_RETURN_IF_ERROR(
            CheckSameRecord(actual, exact, kRelative, kAbsolute));
        FSDP_RETURN_IF_ERROR(CheckThat(
            actual.losses.back(), Le(actual.losses.front() / 2), "last loss"));
        // A difference shows that int8 was sent.
        const bool same = CheckSameRecord(actual, exact, 0, 0).ok();
        return Check(same == (world.world_size() == 1),
                     same ? "exact" : "quantised alone");
      }));
}

INSTANTIATE_TEST_SUITE_P(
    All, QuantizedTrainingTest,
    ::testing::Combine(
        ::testing::Values(
            Setting{"Gathers", true, false}, Setting{"Sums", false, true},
            Setting{"Both", true, true},
            Setting{"ShardGradOp", true, true, ShardingStrategy::kShardGradOp},
            Setting{"ShardOptimizerNoSync", true, true,
                    ShardingStrategy::kShardOptimizer, false, 3},
            Setting{"Hybrid", true, true, ShardingStrategy::kHybridShard},
            Setting{"InBFloat16", true, true, ShardingStrategy::kFullShard,
                    true}),
        ::testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param).name, "Of",
                          std::get<1>(info.param));
    });

TEST(QuantizedTrainingTest, SmallUnitsReplicatedOnesAndUserHooksAreExact) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options small = Quantized();
    small.quantize.min_bytes = int64_t{1} << 30;
    FSDP_RETURN_IF_ERROR(ExpectSame(world, small, BlockUnits()));
    Options replicated = BlockUnits();
    replicated.unit.strategy = ShardingStrategy::kNoShard;
    return ExpectSame(world, Quantized(replicated), replicated);
  }));
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    TrainingTask task = LongTraining();
    task.prepare = [](ShardedModuleBase& model) {
      return model.SetReductionHooks(CompressedReduceScatter(at::kBFloat16));
    };
    Options sums = Quantized();
    sums.quantize.gather = false;
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, Train(world, sums, task));
    FSDP_ASSIGN_OR_RETURN(const TaskRecord expected,
                          Train(world, BlockUnits(), task));
    return CheckSameRecord(actual, expected, 0, 0);
  }));
}

TEST(QuantizedTrainingTest, ASmallerGroupGivesBackwardWhatForwardHad) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    Options grouped = Quantized();
    grouped.unit.backward_group_size = 2;
    grouped.reshard_root_after_forward = true;
    return ExpectSame(world, grouped, Quantized());
  }));
}

// --- Ranks of one host, and refusals -----------------------------------------

absl::StatusOr<TaskRecord> TrainOn(
    const std::vector<std::unique_ptr<Communicator>>& group,
    const Options& options) {
  TaskRecord record;
  FSDP_RETURN_IF_ERROR(
      AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(TaskRecord own,
                              Train(world, options, LongTraining()));
        if (world.rank() == 0) record = std::move(own);
        return absl::OkStatus();
      })));
  return record;
}

TEST(QuantizedSharedMemoryTest, GivesTheBitsOfRanksThatShareNone) {
  for (const bool gather : {false, true}) {
    Options options = Quantized();
    options.quantize.gather = gather;
    ASSERT_OK_AND_ASSIGN(const auto sharing, CreateSharedMemoryGroup(2));
    ASSERT_OK_AND_ASSIGN(const TaskRecord shared, TrainOn(sharing, options));
    ASSERT_OK_AND_ASSIGN(const auto local, comm::CreateLocalGroup(2));
    ASSERT_OK_AND_ASSIGN(const TaskRecord apart, TrainOn(local, options));
    EXPECT_OK(CheckSameRecord(shared, apart, 0, 0));
  }
}

TEST(QuantizedSharedMemoryTest, ParametersAreSharedUnlessGathersAreQuantised) {
  for (const bool gather : {false, true}) {
    ASSERT_OK_AND_ASSIGN(const auto group, CreateSharedMemoryGroup(2));
    EXPECT_OK(AllOk(RunRanks(group, [&](Communicator& world) -> absl::Status {
      Options options = Quantized();
      options.quantize.gather = gather;
      FSDP_ASSIGN_OR_RETURN(Net model, FullyShard(MakeNet(kDim, kBlocks),
                                                  Unowned(world), options));
      return Check((model->PlanMemory().gathered > 0) == gather,
                   model->Describe());
    })));
  }
}

TEST(QuantizeOptionTest, IsTheSameOnAllRanksAndMakesSense) {
  struct Case {
    bool reduces;
    int64_t blocks[2];  // by rank
    const char* text;
  };
  for (const Case& c : {Case{true, {0, 1}, "a block of 0 numbers"},
                        Case{false, {32, 64}, "gathers in blocks of 64"}}) {
    EXPECT_THAT(
        RunRanks(2,
                 [&c](Communicator& world) {
                   Options options = Quantized();
                   options.quantize.reduce = c.reduces;
                   options.quantize.block = c.blocks[world.rank()];
                   return FullyShard(MakeNet(kDim, 1), Unowned(world), options)
                       .status();
                 }),
        Each(StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.text))));
  }
}

}  // namespace
}  // namespace fsdp::testing::quantized_net
