#include "tools/checkpoint/tool.h"

#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/real_file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/commands.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::testing::AllOf;
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
Ended Tool(const std::vector<std::string>& words) {
  std::ostringstream out;
  std::ostringstream err;
  Ended ended;
  ended.code = RunTool(RealFileSystem(), words, {out, err});
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

TEST_F(ToolTest, LooksAtARunAndVerifiesIt) {
  const Ended list = Tool({"ls", Path("run")});
  EXPECT_EQ(list.code, kFine);
  EXPECT_THAT(list.out, AllOf(ContainsRegex(" 7 .* 20[0-9-]+ [0-9:]+  latest"),
                              ContainsRegex(" 3 +5 ")));
  EXPECT_THAT(list.err, IsEmpty());
  const Ended show = Tool({"show", Path("run"), "--tensors"});
  EXPECT_EQ(show.code, kFine);
  EXPECT_THAT(show.out, HasSubstr("optimizer/exp_avg/w"));
  EXPECT_THAT(Tool({"show", Path("run"), "--part=model", "--tensors"}).out,
              ::testing::Not(HasSubstr("optimizer/exp_avg/w")));
  EXPECT_THAT(Tool({"show", Path("run"), "scalar"}).out,
              HasSubstr("first values: 2\n"));

  EXPECT_EQ(Tool({"verify", Path("run")}).code, kFine);
  const Ended watched = Tool({"verify", Path("run"), "--progress"});
  EXPECT_THAT(watched.err, HasSubstr("\rverify: "));
  ASSERT_OK(FlipByte(files_, Path("run/step-3/model.safetensors"), 4100));
  const Ended damaged = Tool({"verify", Path("run")});
  EXPECT_EQ(damaged.code, kFound);
  EXPECT_THAT(damaged.out, HasSubstr("MiB [0, 1) are damaged"));
}

TEST_F(ToolTest, ComparesAndConsolidates) {
  const Ended diff = Tool({"diff", Path("run/step-3"), Path("run/step-7")});
  EXPECT_EQ(diff.code, kFound);
  EXPECT_THAT(diff.out, ContainsRegex("  scalar +1 +1 element"));

  ASSERT_OK(WriteFolder(files_, Path("ranks"), RankFiles(SmallModel(2), 3)));
  const Ended whole = Tool(
      {"consolidate", "--max_file_bytes=40", Path("ranks"), Path("whole")});
  EXPECT_EQ(whole.code, kFine) << whole.err;
  EXPECT_THAT(whole.out, HasSubstr(": 5 tensors in 2 files, "));
  EXPECT_EQ(Tool({"diff", Path("whole"), Path("run")}).code, kFine);
}

TEST_F(ToolTest, Prunes) {
  EXPECT_THAT(Tool({"prune", Path("run"), "--keep_last=1", "--dry_run"}).out,
              HasSubstr("would remove step-3\n"));
  EXPECT_EQ(Tool({"prune", Path("run"), "--keep_last=1"}).out,
            "removed step-3\n");
  EXPECT_EQ(Tool({"prune", Path("run")}).code, kFailed);
}

TEST_F(ToolTest, SaysWhatIsWrong) {
  struct Case {
    std::vector<std::string> words;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{
           {{"frobnicate"},
            "checkpoint: \"frobnicate\" is no command; see checkpoint --help"},
           {{"show"}, "the command is show PATH [NAME]"},
           {{"show", Path("none")}, Path("none")},
           {{"show", Path("run"), "--part=half"}, "--part=half: model and all"},
           {{"consolidate", Path("run"), Path("out")},
            "tools/interop/dcp.py model"},
           {{"diff", Path("run"), Path("run"), "--top=x"},
            "--top=x: give a number"}}) {
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
    for (const CommandSpec& command : Commands()) {
      EXPECT_THAT(ended.out,
                  HasSubstr(absl::StrCat("\ncheckpoint ", command.name, " ")));
      for (const FlagSpec& flag : command.flags) {
        EXPECT_THAT(Tool({command.name, "--help"}).out,
                    HasSubstr(absl::StrCat("--", flag.name)));
      }
    }
    for (const absl::string_view line : absl::StrSplit(ended.out, '\n')) {
      EXPECT_LE(line.size(), 110u) << line;
    }
  }
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
