#include "tools/checkpoint/text.h"

#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint::tool {
namespace {

TEST(TextTest, Sizes) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(999), "999 B");
  EXPECT_EQ(SizeText(1000), "1.00 kB");
  EXPECT_EQ(SizeText(999'994), "999.99 kB");
  EXPECT_EQ(SizeText(999'996), "1.00 MB");
  EXPECT_EQ(SizeText(std::numeric_limits<int64_t>::max()), "9.22 EB");
}

TEST(TextTest, Numbers) {
  EXPECT_EQ(Thousands(0), "0");
  EXPECT_EQ(Thousands(999), "999");
  EXPECT_EQ(Thousands(1000), "1,000");
  EXPECT_EQ(Thousands(-123456), "-123,456");
  EXPECT_EQ(Count(1, "file"), "1 file");
  EXPECT_EQ(Count(2000, "file"), "2,000 files");
}

TEST(TextTest, NamesDoNotReachTheTerminalAsTheyAre) {
  EXPECT_EQ(Printable("a\x1b[2Jb\n"), "a\\x1b[2Jb\\n");
  EXPECT_EQ(Printable("größe"), "größe");
  EXPECT_EQ(Printable("it's \"w\" \\\""), "it's \"w\" \\\\\"");
}

TEST(TextTest, Columns) {
  EXPECT_EQ(Columns({{"a", "1"}, {"bcd", "23", "x"}, {"e"}}, "lrl"),
            "  a     1\n  bcd  23  x\n  e\n");
  EXPECT_EQ(Columns({}, "l"), "");
}

TEST(ProgressTest, WritesOneLineNowAndThen) {
  std::ostringstream out;
  absl::Time now = absl::UnixEpoch();
  {
    Progress progress(out, "verify", [&now] { return now; });
    progress.Update(0, 4'000'000'000);
    now += absl::Milliseconds(199);
    progress.Update(1'000'000, 4'000'000'000);  // too soon
    now += absl::Milliseconds(801);
    progress.Update(1'000'000'000, 4'000'000'000);
    now += absl::Seconds(3);
    progress.Update(4'000'000'000, 4'000'000'000);
  }
  EXPECT_EQ(out.str(),
            "\rverify: 0 B of 4.00 GB"
            "\rverify: 1.00 GB of 4.00 GB, 1.00 GB/s, 3 s left"
            "\rverify: 4.00 GB of 4.00 GB, 1.00 GB/s, 0 s left\n");
}

TEST(ProgressTest, NothingToDoIsNoLine) {
  std::ostringstream out;
  {
    Progress progress(out, "verify", [] { return absl::UnixEpoch(); });
  }
  EXPECT_EQ(out.str(), "");
}

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
