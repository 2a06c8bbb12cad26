// CommitBy::kManifest: runs on storage that renames, locks and writes over
// nothing.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/forwarding_file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/run/run.h"
#include "checkpoint/tests/sharded_training.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "fsdp/testing/toy_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/tool.h"

namespace fsdp::checkpoint::testing {
namespace {

using ::fsdp::comm::Communicator;
using ::fsdp::comm::testing::RunAllRanks;
using ::fsdp::comm::testing::RunRanks;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::Unowned;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kRoot[] = "/run";

// Buffers that differ between ranks, which take a file and an exchange more.
TrainingSetup OddSetup() {
  TrainingSetup setup;
  setup.model = ModelKind::kOdd;
  setup.units = false;
  return setup;
}

class ByManifestTest : public ::testing::Test {
 protected:
  CheckpointerOptions Options() {
    CheckpointerOptions options;
    options.files = &files_;
    options.layout = SaveLayout::kPerRank;
    options.commit_by = CommitBy::kManifest;
    options.staging_bytes = 1 << 10;  // several times as much is written
    return options;
  }

  absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Communicator& world) {
    return Checkpointer::Open(kRoot, Unowned(world), Options());
  }

  // What `ranks` have after they have loaded the newest checkpoint, which is
  // that of `step`.
  void ExpectLatest(int ranks, int64_t step, const Values& values) {
    EXPECT_OK(RunAllRanks(ranks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          const auto training,
          ShardedTraining::Make(world, OddSetup(), /*seed=*/5));
      FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
      TrainingRun run = training->AsRun();
      FSDP_ASSIGN_OR_RETURN(const std::optional<int64_t> loaded,
                            checkpoints->LoadLatest(run));
      EXPECT_EQ(loaded, step);
      FSDP_ASSIGN_OR_RETURN(const Values actual, training->Gather());
      // Others have buffers of their own.
      return world.rank() == 0 ? CheckSameBits(actual, values)
                               : absl::OkStatus();
    }));
  }

  SimulatedFileSystem disk_;
  ObjectStoreMount files_{disk_};
};

// Saves after each step of a training, and keeps what it then had.
absl::Status TrainAndSave(ShardedTraining& training, Checkpointer& checkpoints,
                          const std::vector<int64_t>& steps, bool async,
                          Values* last) {
  for (const int64_t step : steps) {
    FSDP_RETURN_IF_ERROR(training.Step(static_cast<int>(step)).status());
    FSDP_ASSIGN_OR_RETURN(*last, training.Gather());
    const TrainingRun run = training.AsRun();
    FSDP_RETURN_IF_ERROR(async ? checkpoints.SaveAsync(step, run)
                               : checkpoints.Save(step, run));
  }
  return checkpoints.Wait();
}

TEST_F(ByManifestTest, Retention) {
  Values values;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, OddSetup(), /*seed=*/1));
    CheckpointerOptions options = Options();
    options.keep_last = 2;
    options.keep_every = 3;
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints,
                          Checkpointer::Open(kRoot, Unowned(world), options));
    Values last;
    FSDP_RETURN_IF_ERROR(TrainAndSave(
        *training, *checkpoints, {1, 2, 3, 4, 5, 6}, /*async=*/true, &last));
    EXPECT_THAT(*checkpoints->Steps(), ElementsAre(3, 5, 6));
    if (world.rank() == 0) values = std::move(last);
    return absl::OkStatus();
  }));
  EXPECT_THAT(*files_.List(kRoot),
              ElementsAre(HasSubstr("by-manifest"), HasSubstr("checkpoints"),
                          "latest", "step-3", "step-5", "step-6"));
  ExpectLatest(2, 6, values);
}

// A save of a step that is there changes nothing of it, by no rank.
TEST_F(ByManifestTest, AStepThatIsThere) {
  Values values;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, OddSetup(), /*seed=*/1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
    Values last;
    FSDP_RETURN_IF_ERROR(TrainAndSave(*training, *checkpoints, {1},
                                      /*async=*/false, &last));
    if (world.rank() == 0) values = std::move(last);
    FSDP_RETURN_IF_ERROR(training->Step(2).status());
    EXPECT_THAT(checkpoints->Save(1, training->AsRun()),
                StatusIs(absl::StatusCode::kAlreadyExists,
                         HasSubstr("/run/step-1 is there already")));
    return absl::OkStatus();
  }));
  ExpectLatest(2, 1, values);
}

TEST_F(ByManifestTest, Consolidates) {
  EXPECT_OK(RunAllRanks(2, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const auto training,
                          ShardedTraining::Make(world, OddSetup(), /*seed=*/1));
    FSDP_ASSIGN_OR_RETURN(const auto checkpoints, Open(world));
    return checkpoints->Save(1, training->AsRun());
  }));
  // One that is being written is none.
  ASSERT_OK(files_.MakeFolder("/run/step-2"));
  EXPECT_OK(
      tool::Consolidate(disk_, kRoot, "/out", tool::ConsolidateOptions()));
  EXPECT_THAT(*disk_.List("/out"), ElementsAre("model.safetensors"));
}

TEST_F(ByManifestTest, WhatCannotBe) {
  CheckpointerOptions shared = Options();
  shared.layout = SaveLayout::kShared;
  EXPECT_THAT(Checkpointer::Open(kRoot, nullptr, shared),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("set layout to SaveLayout::kPerRank")));
  CheckpointerOptions overwrite = Options();
  overwrite.overwrite = true;
  EXPECT_THAT(Checkpointer::Open(kRoot, nullptr, overwrite),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("overwrite with commit_by")));
  EXPECT_THAT(
      RunRanks(
          2,
          [&](Communicator& world) {
            CheckpointerOptions options = Options();
            if (world.rank() == 1) {
              options.commit_by = CommitBy::kRename;
            }
            return Checkpointer::Open(kRoot, Unowned(world), options).status();
          }),
      Each(StatusIs(absl::StatusCode::kInvalidArgument,
                    HasSubstr("commit_by differ between ranks"))));
  EXPECT_THAT(*disk_.List("/"), IsEmpty());
}

TEST_F(ByManifestTest, WhatOneRankRefusesAllRefuse) {
  constexpr int kRanks = 3;
  for (const int wrong : {0, kRanks - 1}) {
    EXPECT_THAT(
        RunRanks(kRanks,
                 [&](Communicator& world) {
                   CheckpointerOptions options = Options();
                   if (world.rank() == wrong) {
                     options.texts["manifest.json"] = "{}";
                   }
                   return Checkpointer::Open(kRoot, Unowned(world), options)
                       .status();
                 }),
        Each(StatusIs(absl::StatusCode::kInvalidArgument,
                      HasSubstr("a checkpoint has a manifest.json of its "
                                "own"))))
        << wrong;
    EXPECT_THAT(*disk_.List("/"), IsEmpty());
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::testing
