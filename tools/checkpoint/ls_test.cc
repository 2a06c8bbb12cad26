#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/show.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using testing::FlipByte;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::SaveRun;
using testing::SmallModel;
using testing::WriteFolder;

std::optional<absl::Time> Noon(const std::string& path) {
  if (path == "/run/step-9.incomplete-77") return std::nullopt;
  return absl::FromCivil(absl::CivilSecond(2026, 11, 22, 12, 0, 0),
                         absl::LocalTimeZone());
}

TEST(LsTest, CheckpointsOfARun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 12, SmallModel()));
  ASSERT_OK(files.MakeFolder("/run/step-9.incomplete-77"));
  ASSERT_OK(ReplaceFile(files, "/run/step-9.incomplete-77/x", "12345"));
  ASSERT_OK(files.MakeFolder("/run/step-1.deleted"));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run", Noon));
  EXPECT_THAT(text, HasSubstr("/run: checkpoints of a run\n"));
  EXPECT_THAT(text, HasSubstr("  1  "));
  EXPECT_THAT(text, ContainsRegex(" 3 +5 +[0-9.]+ kB  2026-11-22 12:00:00\n"));
  EXPECT_THAT(text, ContainsRegex(" 12 .*  2026-11-22 12:00:00  latest\n"));
  EXPECT_THAT(text, ContainsRegex(" 9 +1 +5 B  \\? +incomplete: being"));
  EXPECT_THAT(text, HasSubstr("partly removed"));
}

// Of a run that commits by manifests; otherwise a manifest has been lost.
TEST(LsTest, WhatHasNoManifest) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(files.MakeFolder("/run/step-9"));
  ASSERT_OK(ReplaceFile(files, "/run/step-9/x", "12345"));
  ASSERT_OK_AND_ASSIGN(const std::string lost, List(files, "/run", Noon));
  EXPECT_THAT(lost, ContainsRegex(" 9 +1 +5 B .*damaged: .*manifest.json"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-by-manifest", ""));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run", Noon));
  EXPECT_THAT(text, ContainsRegex(" 9 +1 +5 B .*incomplete: being"));
  EXPECT_THAT(text, ContainsRegex(" 3 .*latest\n"));
}

TEST(LsTest, WhatIsDamaged) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 12, SmallModel()));
  ASSERT_OK(FlipByte(files, "/run/step-12/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run", Noon));
  EXPECT_THAT(text, ContainsRegex(" 12 .*damaged: /run/step-12/manifest.json"));
  EXPECT_THAT(text, ContainsRegex(" 3 .* kB"));
}

TEST(LsTest, ARunWithoutCheckpoints) {
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/run"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-checkpoints", ""));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run", Noon));
  EXPECT_EQ(text, "/run: checkpoints of a run\n  none yet\n");
}

TEST(LsTest, WhatElseAFolderIs) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ASSERT_OK_AND_ASSIGN(const std::string model, List(files, "/hf", Noon));
  EXPECT_THAT(model, AllOf(HasSubstr("/hf: a Hugging Face model, 5 tensors in "
                                     "1 file, 4.18 kB\n"),
                           Not(HasSubstr("step"))));
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK_AND_ASSIGN(const std::string one, List(files, "/run/step-3", Noon));
  EXPECT_THAT(one, HasSubstr("a checkpoint of step 3, 6 tensors in 2 files"));
  EXPECT_THAT(List(files, "/nothing", Noon),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nothing")));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
