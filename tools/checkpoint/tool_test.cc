#include "tools/checkpoint/tool.h"

#include <unistd.h>

#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/file_system.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/testing/small_checkpoint.h"

namespace fsdp::checkpoint::tool {
namespace {

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

}  // namespace
}  // namespace fsdp::checkpoint::tool
