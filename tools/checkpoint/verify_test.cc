#include "tools/checkpoint/verify.h"

#include <string>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using testing::FlipByte;
using ::testing::HasSubstr;
using testing::ModelFiles;
using testing::SaveRun;
using testing::SmallModel;
using testing::WriteFolder;

TEST(VerifyTest, AllCheckpointsOfARun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 12, SmallModel()));
  int calls = 0;
  ASSERT_OK_AND_ASSIGN(
      const VerifyResult result,
      Verify(files, "/run", [&calls](int64_t, int64_t) { ++calls; }));
  EXPECT_EQ(result.problems, 0);
  EXPECT_EQ(result.text, "/run/step-3\n/run/step-12\nsound\n");
  EXPECT_GT(calls, 0);
}

// One that is being written, where checkpoints are committed by manifests.
TEST(VerifyTest, WhatHasNoManifest) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(files.MakeFolder("/run/step-9"));
  ASSERT_OK_AND_ASSIGN(const VerifyResult lost, Verify(files, "/run", nullptr));
  EXPECT_EQ(lost.problems, 1);
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-by-manifest", ""));
  ASSERT_OK_AND_ASSIGN(const VerifyResult result,
                       Verify(files, "/run", nullptr));
  EXPECT_EQ(result.text, "/run/step-3\nsound\n");
}

TEST(VerifyTest, ListsAllProblems) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(SaveRun(files, "/run", 4, SmallModel()));
  const std::string step = "/run/step-3/";
  ASSERT_OK(FlipByte(files, step + "model.safetensors", 4100));
  ASSERT_OK(files.RemoveFile(step + "training.json"));
  ASSERT_OK(ReplaceFile(files, step + "more.txt", "?"));
  ASSERT_OK(FlipByte(files, "/run/step-4/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const VerifyResult result,
                       Verify(files, "/run", nullptr));
  EXPECT_EQ(result.problems, 4);
  EXPECT_THAT(result.text,
              HasSubstr("model.safetensors: MiB [0, 1) are damaged"));
  EXPECT_THAT(result.text, HasSubstr("training.json: is missing"));
  EXPECT_THAT(result.text, HasSubstr("more.txt: is there"));
  EXPECT_THAT(result.text, HasSubstr("/run/step-4/manifest.json"));
  EXPECT_THAT(result.text, HasSubstr("4 problems\n"));
  ASSERT_OK_AND_ASSIGN(const VerifyResult one,
                       Verify(files, "/run/step-3", nullptr));
  EXPECT_EQ(one.problems, 3);
}

TEST(VerifyTest, WhatOthersHaveWritten) {
  SimulatedFileSystem files;
  ASSERT_OK(WriteFolder(files, "/hf", ModelFiles(SmallModel(), "model", 40)));
  ASSERT_OK_AND_ASSIGN(const VerifyResult sound, Verify(files, "/hf", nullptr));
  EXPECT_EQ(sound.text,
            "/hf: no manifest, so that only its structure can be checked\n"
            "sound\n");
  ASSERT_OK_AND_ASSIGN(const auto names, files.List("/hf"));
  ASSERT_OK(files.RemoveFile(JoinPath("/hf", names[0])));
  ASSERT_OK_AND_ASSIGN(const VerifyResult result,
                       Verify(files, "/hf", nullptr));
  EXPECT_EQ(result.problems, 1);
  EXPECT_THAT(result.text, HasSubstr(names[0]));
}

TEST(VerifyTest, NothingToVerify) {
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/run"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-checkpoints", ""));
  EXPECT_THAT(Verify(files, "/run", nullptr),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("/run has no checkpoint")));
  EXPECT_THAT(Verify(files, "/no", nullptr),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no")));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
