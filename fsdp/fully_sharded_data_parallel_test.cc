#include "fsdp/fully_sharded_data_parallel.h"

// Compares trainings of sharded models with those of one plain model.
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/training_task.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;

TrainingTask Steps(int steps) {
  TrainingTask task = ToyTask(kDim);
  task.steps = steps;
  return task;
}

absl::StatusOr<TaskRecord> TrainSharded(Communicator& world, int steps) {
  FSDP_ASSIGN_OR_RETURN(auto model, FullyShard(MakeNet(kDim, kBlocks),
                                               Unowned(world), BlockUnits()));
  return RunSharded(Steps(steps), model);
}

struct OptionsCase {
  const char* name;
  bool reshard;
  bool prefetch;
  bool units;
};

class EqualsPlainTraining
    : public ::testing::TestWithParam<std::tuple<int, OptionsCase>> {};

TEST_P(EqualsPlainTraining, LossesAndParametersAfterTenSteps) {
  const auto& [world_size, c] = GetParam();
  Options options = c.units ? BlockUnits() : Options();
  options.unit.strategy =
      c.reshard ? ShardingStrategy::kFullShard : ShardingStrategy::kShardGradOp;
  options.prefetch.forward = c.prefetch;
  options.prefetch.backward = c.prefetch;
  EXPECT_OK(RunAllRanks(
      world_size, [&options = options](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(const Mesh mesh,
                              Mesh::Create(Unowned(world), {{"shard", -1}}));
        return CheckToy(Steps(10), mesh, options, 1e-5, 1e-6);
      }));
}

INSTANTIATE_TEST_SUITE_P(
    All, EqualsPlainTraining,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 5, 8),
        ::testing::Values(OptionsCase{"FullShard", true, true, true},
                          OptionsCase{"NoPrefetch", true, false, true},
                          OptionsCase{"KeptAfterForward", false, true, true},
                          OptionsCase{"RootOnly", true, true, false})),
    [](const auto& info) {
      return absl::StrCat(std::get<1>(info.param).name, "World",
                          std::get<0>(info.param));
    });

TEST(TrainingTest, IsBitEqualToPlainTrainingAtOneRank) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, TrainSharded(world, 10));
    const TaskRecord expected =
        RunPlain(Steps(10), MakeNet(kDim, kBlocks), /*world_size=*/1);
    FSDP_RETURN_IF_ERROR(CheckThat(
        actual.parameters, SizeIs(expected.parameters.size()), "parameters"));
    return CheckSameRecord(actual, expected, /*relative=*/0, /*absolute=*/0);
  }));
}

TEST(TrainingTest, IsBitEqualFromRunToRunAndBetweenRanks) {
  std::vector<TaskRecord> runs(6);
  for (int run = 0; run < 2; ++run) {
    ASSERT_OK(RunAllRanks(3, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(runs[3 * run + world.rank()],
                            TrainSharded(world, 5));
      return absl::OkStatus();
    }));
  }
  for (const TaskRecord& other : runs) {
    EXPECT_OK(CheckSameRecord(other, runs.front(), 0, 0));
  }
}

// --- Collectives and memory of a step ----------------------------------------

absl::Status Step(FullyShardedDataParallel<NetImpl>& model) {
  const at::Tensor x = Rows(model->communicator().rank(), 4, kDim);
  at::Tensor loss = Loss(model->forward(x), x);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  return absl::OkStatus();
}

absl::Status CheckCounts(const CollectiveLog& log, int64_t gathers,
                         int64_t reductions) {
  FSDP_RETURN_IF_ERROR(CheckThat(log.TotalsOf(Collective::kAllGather).count,
                                 Eq(gathers), "all-gathers"));
  return CheckThat(log.TotalsOf(Collective::kReduceScatter).count,
                   Eq(reductions), "reduce-scatters");
}

TEST(TrainingTest, AStepTakes2nMinus1AllGathersAndNReduceScatters) {
  RecordedRanks ranks(2);
  const auto run = [&ranks](Communicator& communicator) -> absl::Status {
    CollectiveLog& log = ranks.logs[communicator.rank()];
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<NetImpl> model,
                          FullyShard(MakeNet(kDim, kBlocks),
                                     Unowned(communicator), BlockUnits()));
    constexpr int64_t kUnits = kBlocks + 1;
    for (int step = 0; step < 3; ++step) {
      log.Clear();
      FSDP_RETURN_IF_ERROR(Step(model));
      FSDP_RETURN_IF_ERROR(CheckCounts(log, 2 * kUnits - 1, kUnits));
    }
    log.Clear();
    c10::NoGradGuard no_grad;
    model->forward(Rows(0, 1, kDim));
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after evaluation"));
    return CheckCounts(log, kUnits, 0);
  };
  EXPECT_OK(AllOk(RunRanks(ranks.group, run)));
}

TEST(TrainingTest, ThePeakOfManagedMemoryIsThatOfThePlan) {
  std::vector<Options> all(5, BlockUnits());
  all[1].prefetch.forward = false;
  all[1].prefetch.backward = false;
  all[2].unit.precision.param_dtype = at::kBFloat16;
  all[3].unit.precision.param_dtype = at::kBFloat16;
  all[3].unit.precision.reduce_dtype = at::kFloat;
  all[4].unit.strategy = ShardingStrategy::kShardGradOp;
  for (int ranks : {1, 2, 3}) {
    for (size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, options ", i));
      EXPECT_OK(RunAllRanks(ranks, [&](Communicator& c) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            FullyShardedDataParallel<NetImpl> model,
            FullyShard(MakeNet(/*dim=*/64, 6), Unowned(c), all[i]));
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = Rows(c.rank(), 4, 64);
          FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
        }
        const MemoryStats stats = model->memory_stats();
        const MemoryPlan plan = model->PlanMemory();
        const auto planned =
            static_cast<double>(plan.gathered + plan.in_flight);
        return CheckThat(
            static_cast<double>(stats.parameters.peak_in_use_bytes +
                                stats.gradients.peak_in_use_bytes),
            ::testing::DoubleNear(planned, 0.02 * planned), "peak in use");
      }));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
