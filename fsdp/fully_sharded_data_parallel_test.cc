#include "fsdp/fully_sharded_data_parallel.h"

// Compares trainings of sharded models with those of one plain model.
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

TEST(TrainingTest, IsBitEqualToPlainTrainingAtOneRank) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const TaskRecord actual, TrainSharded(world, 10));
    const TaskRecord expected =
        RunPlain(Steps(10), MakeNet(kDim, kBlocks), /*world_size=*/1);
    EXPECT_EQ(actual.parameters.size(), expected.parameters.size());
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

}  // namespace
}  // namespace fsdp::testing
