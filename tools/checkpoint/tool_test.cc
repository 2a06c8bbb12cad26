#include "tools/checkpoint/tool.h"

#include <unistd.h>

#include <limits>
#include <sstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/simulated_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::checkpoint::testing::SimulatedFileSystem;
using ::fsdp::testing::StatusIs;
using ::testing::ContainsRegex;
using testing::FlipByte;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::RankFiles;
using testing::SaveRun;
using testing::SmallModel;
using testing::WriteFolder;

struct Ended {
  int code = 0;
  std::string out;
  std::string err;
};

// The program with these words, on the machine's disk.
Ended Tool(const std::vector<std::string>& words, bool progress = false) {
  std::ostringstream out;
  std::ostringstream err;
  Ended ended;
  ended.code = RunTool(RealFileSystem(), words, {out, err, progress});
  ended.out = out.str();
  ended.err = err.str();
  return ended;
}

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK(RemoveTree(files_, root_));
    ASSERT_OK(files_.MakeFolder(root_));
    ASSERT_OK(SaveRun(files_, Path("run"), 3, SmallModel(1)));
    ASSERT_OK(SaveRun(files_, Path("run"), 7, SmallModel(2)));
  }
  void TearDown() override { ASSERT_OK(RemoveTree(files_, root_)); }

  std::string Path(const std::string& name) const {
    return JoinPath(root_, name);
  }

  FileSystem& files_ = RealFileSystem();
  const std::string root_ =
      absl::StrCat(::testing::TempDir(), "/tool_test.", getpid());
};

TEST_F(ToolTest, ListsARunAndVerifiesIt) {
  const Ended list = Tool({"ls", Path("run")});
  EXPECT_EQ(list.code, kFine);
  EXPECT_THAT(list.out, HasSubstr("  latest\n"));
  EXPECT_THAT(list.err, IsEmpty());
  EXPECT_EQ(Tool({"verify", Path("run")}).code, kFine);
  EXPECT_THAT(Tool({"verify", Path("run")}, /*progress=*/true).err,
              HasSubstr("\rverify: 100 % of "));
  ASSERT_OK(FlipByte(files_, Path("run/step-3/model.safetensors"), 4100));
  const Ended damaged = Tool({"verify", Path("run")});
  EXPECT_EQ(damaged.code, kFound);
  EXPECT_THAT(damaged.out, HasSubstr("MiB [0, 1) are damaged"));
}

TEST_F(ToolTest, Consolidates) {
  ASSERT_OK(WriteFolder(files_, Path("ranks"), RankFiles(SmallModel(2), 3)));
  const Ended whole = Tool({"consolidate", Path("ranks"), Path("whole"), "40"});
  EXPECT_EQ(whole.code, kFine) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr(": tensors 5, files 2, "));
  EXPECT_EQ(Tool({"consolidate", Path("ranks"), Path("one")}).code, kFine);
}

TEST_F(ToolTest, SaysWhatIsWrong) {
  struct Case {
    std::vector<std::string> words;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{
           {{"frobnicate"},
            "checkpoint: \"frobnicate\" is no command, or takes other "
            "arguments; see checkpoint --help"},
           {{"ls"}, "\"ls\" is no command, or takes other arguments"},
           {{"verify", "a", "b"}, "\"verify\" is no command, or takes other"},
           {{"verify", Path("none")}, Path("none")},
           {{"consolidate", Path("run"), Path("out")},
            "tools/interop/dcp.py model"},
           {{"consolidate", Path("run"), Path("out"), "0"},
            "0 is no number of bytes"}}) {
    const Ended ended = Tool(c.words);
    EXPECT_EQ(ended.code, kFailed);
    EXPECT_THAT(ended.err, HasSubstr(c.text));
    EXPECT_THAT(ended.out, IsEmpty());
  }
}

TEST_F(ToolTest, Helps) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{}, {"--help"}, {"help"}}) {
    const Ended ended = Tool(words);
    EXPECT_EQ(ended.code, kFine);
    for (const char* command : {"ls", "verify", "consolidate"}) {
      EXPECT_THAT(ended.out, HasSubstr(absl::StrCat("checkpoint ", command)));
    }
  }
}

TEST(SizeTextTest, Sizes) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(999), "999 B");
  EXPECT_EQ(SizeText(1000), "1.00 kB");
  EXPECT_EQ(SizeText(999'994), "999.99 kB");
  EXPECT_EQ(SizeText(999'996), "1.00 MB");
  EXPECT_EQ(SizeText(std::numeric_limits<int64_t>::max()), "9.22 EB");
}

TEST(ListTest, CheckpointsOfARun) {
  SimulatedFileSystem files;
  for (const int step : {3, 5, 12}) {
    ASSERT_OK(SaveRun(files, "/run", step, SmallModel()));
  }
  ASSERT_OK(files.MakeFolder("/run/step-9.incomplete-77"));
  ASSERT_OK(files.MakeFolder("/run/step-1.deleted"));
  ASSERT_OK(FlipByte(files, "/run/step-5/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run"));
  EXPECT_THAT(text, ContainsRegex(" 1 +\\?  partly removed"));
  EXPECT_THAT(text, ContainsRegex(" 3 +[0-9.]+ kB\n"));
  EXPECT_THAT(text, ContainsRegex(" 12 .* kB  latest\n"));
  EXPECT_THAT(text, ContainsRegex(" 9 +\\?  incomplete: being"));
  EXPECT_THAT(text, ContainsRegex(" 5 .*damaged: /run/step-5/manifest.json"));
}

// By a run that commits by manifests; otherwise a manifest has been lost.
TEST(ListTest, WhatHasNoManifest) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  ASSERT_OK(files.MakeFolder("/run/step-9"));
  ASSERT_OK_AND_ASSIGN(const std::string lost, List(files, "/run"));
  EXPECT_THAT(lost, ContainsRegex(" 9 .*damaged: .*manifest.json"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-by-manifest", ""));
  ASSERT_OK_AND_ASSIGN(const std::string text, List(files, "/run"));
  EXPECT_THAT(text, ContainsRegex(" 9 .*incomplete: being"));
  EXPECT_THAT(text, ContainsRegex(" 3 .*latest\n"));
}

TEST(ListTest, WhatIsNoRun) {
  SimulatedFileSystem files;
  ASSERT_OK(SaveRun(files, "/run", 3, SmallModel()));
  EXPECT_THAT(List(files, "/run/step-3"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("/run/step-3 is not the folder of a run")));
  EXPECT_THAT(List(files, "/nothing"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nothing")));
}

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
  EXPECT_THAT(lost.text, HasSubstr("\n1 problem\n"));
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
  ASSERT_OK(ReplaceFile(files, step + "a\x1b[2Jb.txt", "?"));
  ASSERT_OK(FlipByte(files, "/run/step-4/manifest.json", 20));
  ASSERT_OK_AND_ASSIGN(const VerifyResult result,
                       Verify(files, "/run", nullptr));
  EXPECT_EQ(result.problems, 4);
  EXPECT_THAT(result.text,
              HasSubstr("model.safetensors: MiB [0, 1) are damaged"));
  EXPECT_THAT(result.text, HasSubstr("training.json: is missing"));
  EXPECT_THAT(result.text, HasSubstr("a\\x1b[2Jb.txt: is there"));
  EXPECT_THAT(result.text, HasSubstr("/run/step-4/manifest.json"));
  EXPECT_THAT(result.text, HasSubstr("4 problems\n"));
  ASSERT_OK_AND_ASSIGN(const VerifyResult one,
                       Verify(files, "/run/step-3", nullptr));
  EXPECT_EQ(one.problems, 3);
}

TEST(VerifyTest, NothingToVerify) {
  SimulatedFileSystem files;
  ASSERT_OK(files.MakeFolder("/run"));
  const auto refuses = [](const char* text) {
    return StatusIs(absl::StatusCode::kNotFound, HasSubstr(text));
  };
  EXPECT_THAT(Verify(files, "/run", nullptr),
              refuses("/run has no manifest.json"));
  ASSERT_OK(ReplaceFile(files, "/run/.libtorch_fsdp-checkpoints", ""));
  EXPECT_THAT(Verify(files, "/run", nullptr),
              refuses("/run has no checkpoint"));
  EXPECT_THAT(Verify(files, "/no", nullptr), refuses("/no"));
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
