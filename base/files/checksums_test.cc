#include "base/files/checksums.h"

#include <algorithm>
#include <random>
#include <string>

#include "base/files/testing/real_files.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::RandomBytes;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(ChecksumTest, KnownValues) {
  EXPECT_EQ(Crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(Crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(Crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(ChecksumTest, GoesOnFromTheBytesBefore) {
  const std::string bytes(10007, 'x');
  const absl::string_view all = bytes;
  EXPECT_EQ(Crc32c(all), 0x79784974u);
  for (const int64_t front : {0, 1, 4097, 10007}) {
    EXPECT_EQ(Crc32c(all.substr(front), Crc32c(all.substr(0, front))),
              Crc32c(all));
  }
}

FileSums SumsOf(absl::string_view bytes) {
  FileSums sums;
  sums.bytes = static_cast<int64_t>(bytes.size());
  sums.crc32c = Crc32c(bytes);
  for (; !bytes.empty();
       bytes.remove_prefix(std::min<size_t>(bytes.size(), kBlockBytes))) {
    sums.blocks.push_back(Crc32c(bytes.substr(0, kBlockBytes)));
  }
  return sums;
}

class RandomPiecesTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(RandomPiecesTest, RandomCutsInAnyOrder) {
  std::mt19937 random(7);
  const std::string bytes = RandomBytes(GetParam(), 1);
  for (int round = 0; round < 5; ++round) {
    std::vector<FilePiece> pieces;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size =
          random() % 2 == 0 ? random() % 5000 : random() % (2 * kBlockBytes);
      std::vector<FilePiece> more;
      AppendPieces(0, static_cast<int64_t>(at),
                   absl::string_view(bytes).substr(at, size), more);
      pieces.insert(pieces.end(), more.begin(), more.end());
      at += size;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    ASSERT_OK_AND_ASSIGN(const std::vector<FileSums> sums,
                         CombinePieces(pieces, {{"model", GetParam()}}));
    ASSERT_EQ(sums.size(), 1);
    EXPECT_EQ(sums[0], SumsOf(bytes));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RandomPiecesTest,
                         ::testing::Values(0, 1, 4096, kBlockBytes - 1,
                                           kBlockBytes, kBlockBytes + 1,
                                           3 * kBlockBytes + 10007));

TEST(CombinePiecesTest, GapsAndOverlapsAreNamed) {
  const std::vector<NamedSize> files = {{"a", 10}, {"b", 2 * kBlockBytes}};
  struct Case {
    std::vector<FilePiece> pieces;
    std::string text;
  };
  const Case cases[] = {
      {{}, "checksums of a: nobody has written bytes [0, 10)"},
      {{{0, 0, 4, 0}, {0, 5, 5, 0}}, "a: nobody has written bytes [4, 5)"},
      {{{0, 0, 9, 0}}, "a: nobody has written bytes [9, 10)"},
      {{{0, 0, 6, 0}, {0, 4, 6, 0}}, "a: several have written bytes [4, 6)"},
      {{{0, 0, 10, 0}, {0, 2, 3, 0}}, "a: several have written bytes [2, 5)"},
      {{{0, 0, 11, 0}}, "a: a piece of 11 bytes at 0 of a file of 10"},
      {{{0, -1, 1, 0}}, "a: a piece of 1 bytes at -1 of a file of 10"},
      {{{0, 5, INT64_MAX, 0}}, "a piece of 9223372036854775807 bytes at 5"},
      {{{0, 0, 10, 0}, {1, 5, kBlockBytes, 0}},
       "b: a piece of several blocks, bytes [5, 1048581)"},
      {{{2, 0, 1, 0}}, "file 2: there are only 2 files"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(CombinePieces(test.pieces, files),
                StatusIs(absl::StatusCode::kInternal, HasSubstr(test.text)));
  }
}

}  // namespace
}  // namespace fsdp
