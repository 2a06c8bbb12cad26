#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/checkpoint/text.h"

namespace fsdp::checkpoint::tool {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

const CommandSpec& Command() {
  static const auto* const command =
      new CommandSpec{"show",
                      {"PATH", "[NAME]"},
                      "says something",
                      "",
                      {{"all", "", "everything"}, {"top", "N", "how many"}}};
  return *command;
}

TEST(CommandLineTest, FlagsAndArgumentsInAnyOrder) {
  ASSERT_OK_AND_ASSIGN(
      const Arguments arguments,
      Arguments::Parse(Command(), {"--top=3", "a", "--all", "--", "--b"}));
  EXPECT_EQ(arguments[0], "a");
  EXPECT_EQ(arguments[1], "--b");
  EXPECT_EQ(arguments[2], "");
  EXPECT_TRUE(arguments.Has("all"));
  ASSERT_OK_AND_ASSIGN(const int64_t top, arguments.Number("top", 9, 1));
  EXPECT_EQ(top, 3);
  ASSERT_OK_AND_ASSIGN(const Arguments none, Arguments::Parse(Command(), {""}));
  EXPECT_FALSE(none.Has("all"));
  ASSERT_OK_AND_ASSIGN(const int64_t usual, none.Number("top", 9, 1));
  EXPECT_EQ(usual, 9);
}

TEST(CommandLineTest, Refusals) {
  struct Case {
    std::vector<std::string> words;
    std::string text;
  };
  for (const Case& c : std::vector<Case>{
           {{}, "something is missing: the command is show PATH [NAME]"},
           {{"a", "b", "c"}, "there is more than it takes"},
           {{"a", "--x=1"}, "--x is no flag of show, which has --all, --top=N"},
           {{"a", "--all=1"}, "--all=1: write it --all"},
           {{"a", "--top"}, "--top: write it --top=N"},
           {{"a", "--all", "--all"}, "--all is given twice"}}) {
    EXPECT_THAT(
        Arguments::Parse(Command(), c.words),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.text)));
  }
  for (const char* number : {"--top=0", "--top=", "--top=1e3", "--top=x"}) {
    ASSERT_OK_AND_ASSIGN(const Arguments arguments,
                         Arguments::Parse(Command(), {"a", number}));
    EXPECT_THAT(arguments.Number("top", 9, 1),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("give a number of at least 1")));
  }
}

TEST(CommandLineTest, HelpHasEveryFlag) {
  EXPECT_EQ(HelpOf("checkpoint", Command()),
            "checkpoint show PATH [NAME]\n  says something\n"
            "  --all    everything\n  --top=N  how many\n");
}

}  // namespace
}  // namespace fsdp::checkpoint::tool
