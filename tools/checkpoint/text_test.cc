#include "tools/checkpoint/text.h"

#include <cstdint>
#include <limits>

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

}  // namespace
}  // namespace fsdp::checkpoint::tool
