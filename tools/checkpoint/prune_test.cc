#include "tools/checkpoint/prune.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/commit_by.h"
#include "checkpoint/commit/testing/save_files.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/object_store_mount.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::ObjectStoreMount;
using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using testing::FlipByte;
using ::testing::HasSubstr;
using testing::ModelFiles;
using testing::SaveRun;
using testing::SmallModel;
using testing::WriteFolder;

class PruneTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const int64_t step : {10, 15, 20, 25}) {
      ASSERT_OK(SaveRun(files_, "/run", step, SmallModel()));
    }
    ASSERT_OK(files_.MakeFolder("/run/step-30.incomplete-77"));
  }

  std::vector<int64_t> Steps() {
    std::vector<int64_t> steps;
    const auto list = ListCheckpoints(files_, "/run");
    EXPECT_OK(list);
    for (const Committed& one : *list) {
      steps.push_back(one.step);
    }
    return steps;
  }

  static PruneOptions Keep(int64_t last, int64_t every) {
    PruneOptions options;
    options.keep_last = last;
    options.keep_every = every;
    return options;
  }

  SimulatedFileSystem files_;
};

TEST_F(PruneTest, RemovesWhatNeedNotBeKept) {
  PruneOptions options = Keep(1, 10);
  options.dry_run = true;
  ASSERT_OK_AND_ASSIGN(const std::string plan, Prune(files_, "/run", options));
  EXPECT_EQ(plan,
            "would remove step-15\n"
            "would remove step-30.incomplete-77, which a run has left\n");
  EXPECT_THAT(Steps(), ElementsAre(10, 15, 20, 25));
  options.dry_run = false;
  ASSERT_OK_AND_ASSIGN(const std::string done, Prune(files_, "/run", options));
  EXPECT_EQ(done,
            "removed step-15\nremoved step-30.incomplete-77, which a run has "
            "left\n");
  EXPECT_THAT(Steps(), ElementsAre(10, 20, 25));
  ASSERT_OK_AND_ASSIGN(const std::string again, Prune(files_, "/run", options));
  EXPECT_EQ(again, "there is nothing to remove\n");
}

// By manifest: on storage that renames and locks nothing, beside a run.
TEST(PruneByManifestTest, RemovesCheckpointsOnly) {
  SimulatedFileSystem disk;
  ObjectStoreMount files(disk);
  ASSERT_OK_AND_ASSIGN(
      const std::unique_ptr<CheckpointFolder> run,
      CheckpointFolder::Claim(files, "/run", CommitBy::kManifest));
  for (const int64_t step : {10, 15, 20}) {
    ASSERT_OK(checkpoint::testing::Save(files, *run, step,
                                        checkpoint::testing::ContentsOf(1)));
  }
  ASSERT_OK(run->Begin(30));
  PruneOptions options;
  options.keep_last = 1;
  options.keep_every = 10;
  ASSERT_OK_AND_ASSIGN(const std::string done, Prune(files, "/run", options));
  EXPECT_EQ(done, "removed step-15\n");
  ASSERT_OK_AND_ASSIGN(const auto names, files.List("/run"));
  EXPECT_THAT(names,
              ::testing::IsSupersetOf({"step-10", "step-20", "step-30"}));
  EXPECT_THAT(names, ::testing::Not(::testing::Contains("step-15")));
}

TEST_F(PruneTest, OnlyWhenTheNewestIsSound) {
  ASSERT_OK(FlipByte(files_, "/run/step-25/model.safetensors", 4100));
  EXPECT_THAT(Prune(files_, "/run", Keep(1, 0)),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("the newest checkpoint is damaged")));
  EXPECT_THAT(Steps(), ElementsAre(10, 15, 20, 25));
}

TEST_F(PruneTest, NotWhileARunIsAtWork) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<CheckpointFolder> run,
                       CheckpointFolder::Claim(files_, "/run"));
  EXPECT_THAT(
      Prune(files_, "/run", Keep(1, 0)),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("process ")));
  EXPECT_THAT(Steps(), ElementsAre(10, 15, 20, 25));
}

TEST_F(PruneTest, Refusals) {
  EXPECT_THAT(
      Prune(files_, "/run", Keep(0, 5)),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--keep_last=N")));
  ASSERT_OK(WriteFolder(files_, "/hf", ModelFiles(SmallModel())));
  EXPECT_THAT(Prune(files_, "/hf", Keep(1, 0)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("/hf is not the folder of a run")));
  EXPECT_THAT(Prune(files_, "/none", Keep(1, 0)),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/none")));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
