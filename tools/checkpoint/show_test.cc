#include "tools/checkpoint/show.h"

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "checkpoint/tensor/tensor_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ContainsRegex;
using testing::Floats;
using ::testing::HasSubstr;
using testing::ModelFiles;
using ::testing::Not;
using testing::RankFiles;
using testing::SaveRun;
using testing::SmallModel;
using testing::WriteFolder;

TEST(ShowTest, ACheckpoint) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/run"));
  ASSERT_OK_AND_ASSIGN(const std::string text, Show(source, false));
  EXPECT_THAT(text, HasSubstr("/run/step-3: a checkpoint of step 3\n4 files"));
  EXPECT_THAT(text, ContainsRegex("ranks/rank-00000.safetensors +4.14 kB\n"));
  EXPECT_THAT(text, ContainsRegex("  F32 +4 tensors +25 elements +100 B\n"));
  EXPECT_THAT(text, ContainsRegex("  all +6 tensors +33 elements +134 B\n"));
  EXPECT_THAT(text, Not(HasSubstr("[3, 4]")));
  ASSERT_OK_AND_ASSIGN(const std::string all, Show(source, true));
  EXPECT_THAT(all,
              ContainsRegex("  w +F32\\[3, 4\\] +48 B  model.safetensors"));
  EXPECT_THAT(all, ContainsRegex("optimizer/exp_avg/w +F32\\[3, 4\\] +48 B  "
                                 "optimizer/exp_avg.safetensors"));
  EXPECT_THAT(all, ContainsRegex("  empty +F32\\[0, 3\\] +0 B\n"));
}

TEST(ShowTest, PiecesOfRanks) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/ranks", RankFiles(SmallModel(), 2)));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/ranks"));
  ASSERT_OK_AND_ASSIGN(const std::string text, Show(source, true));
  EXPECT_THAT(text, HasSubstr("safetensors files of single ranks"));
  EXPECT_THAT(text, ContainsRegex("  w .* more, in [0-9]+ pieces\n"));
}

TEST(ShowTest, FiguresOfATensor) {
  SimulatedFileSystem files;
  const std::vector<testing::SmallTensor> model = {
      Floats("x", {2, 3}, {3, NAN, -4, INFINITY, -0.0F, 0}),
      {{"f8", Dtype::kF8E4M3, {2}}, "\x3c\x7f"},
      {{"none", Dtype::kF32, {0}}, ""}};
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(model)));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/hf"));
  int64_t done = 0;
  const auto progress = [&done](int64_t now, int64_t) { done = now; };
  ASSERT_OK_AND_ASSIGN(const std::string text,
                       ShowTensor(source, "x", progress));
  EXPECT_EQ(text,
            "x  F32[2, 3]  24 B  model.safetensors\n"
            "  min    -4\n  max    3\n  mean   -0.25\n  norm   5\n"
            "  zeros  2\n  NaN    1\n  Inf    1\n"
            "first values: 3, nan, -4, inf, -0, 0\n");
  EXPECT_EQ(done, 24);
  ASSERT_OK_AND_ASSIGN(const std::string bytes,
                       ShowTensor(source, "f8", nullptr));
  EXPECT_EQ(bytes,
            "f8  F8_E4M3[2]  2 B  model.safetensors\n"
            "first values: 0x3c, 0x7f\n");
  ASSERT_OK_AND_ASSIGN(const std::string none,
                       ShowTensor(source, "none", nullptr));
  EXPECT_THAT(none, HasSubstr("first values: none"));
}

TEST(ShowTest, NamesThatAreNotThere) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel())));
  ASSERT_OK_AND_ASSIGN(const Source source, OpenSource(files, "/hf"));
  EXPECT_THAT(
      ShowTensor(source, "scala", nullptr),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("did you mean scalar?")));
  EXPECT_THAT(ShowTensor(source, "\x1b[2J", nullptr),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("\"\\x1b[2J\"; --tensors lists")));
}

using ::testing::AllOf;
using testing::FlipByte;
using testing::ModelFiles;
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
