#include "checkpoint/torch_archive/crc32.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/string_view.h"

namespace fsdp::checkpoint {
namespace {

std::string Text(size_t size) {
  std::string text(size, 0);
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * i % 251);
  return text;
}

// By Python's zlib.crc32().
TEST(Crc32Test, KnownOnes) {
  EXPECT_EQ(Crc32(""), 0u);
  EXPECT_EQ(Crc32("1"), 0x83dcefb7u);
  EXPECT_EQ(Crc32("123456789"), 0xcbf43926u);
  EXPECT_EQ(Crc32(std::string(32, '\0')), 0x190a55adu);
}

TEST(Crc32Test, PiecesMakeTheWhole) {
  const std::string text = Text(211);
  const absl::string_view view = text;
  const uint32_t whole = Crc32(text);
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    const uint32_t first = Crc32(view.substr(0, cut));
    const absl::string_view rest = view.substr(cut);
    EXPECT_EQ(Crc32(rest, first), whole) << cut;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
