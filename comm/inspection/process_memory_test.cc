#include "comm/inspection/process_memory.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

TEST(ProcessMemoryTest, IsReadFromTheStatusOfTheProcess) {
  const auto memory = ParseProcessMemory(
      "Name:\tx\nVmPeak:\t  999 kB\nVmHWM:\t    2048 kB\nVmRSS:\t  1024 kB\n");
  ASSERT_TRUE(memory.has_value());
  EXPECT_EQ(memory->resident_bytes, 1 << 20);
  EXPECT_EQ(memory->peak_bytes, 2 << 20);
}

TEST(ProcessMemoryTest, NothingWhereTheSystemDoesNotTell) {
  for (const char* status :
       {"", "VmRSS: 5 kB\n", "VmHWM: 5 kB\n", "VmRSS: 5\nVmHWM: 5 kB\n",
        "VmRSS: x kB\nVmHWM: 5 kB\n"}) {
    EXPECT_EQ(ParseProcessMemory(status).has_value(), false) << status;
  }
}

TEST(ProcessMemoryTest, ThisProcessGrows) {
  const auto before = ReadProcessMemory();
  ASSERT_TRUE(before.has_value());
  const std::vector<char> much(64 << 20, 'x');
  const auto after = ReadProcessMemory();
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(much.back(), 'x');
  EXPECT_GE(after->resident_bytes, before->resident_bytes + (60 << 20));
  EXPECT_GE(after->peak_bytes, after->resident_bytes);
}

TEST(ProcessMemoryTest, BytesAreShort) {
  EXPECT_EQ(BytesText(0), "0 KiB");
  EXPECT_EQ(BytesText(1023 << 10), "1023 KiB");
  EXPECT_EQ(BytesText(3 << 19), "1.5 MiB");
  EXPECT_EQ(BytesText(int64_t{5} << 29), "2.5 GiB");
}

}  // namespace
}  // namespace fsdp::comm
