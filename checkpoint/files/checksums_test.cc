#include "checkpoint/files/checksums.h"

#include <algorithm>
#include <limits>
#include <random>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "checkpoint/files/testing/real_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/checksum.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::RandomBytes;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

FileSums SumsOf(absl::string_view bytes) {
  FileSums sums;
  sums.bytes = static_cast<int64_t>(bytes.size());
  sums.crc32c = offload::Crc32c(bytes);
  for (; !bytes.empty();
       bytes.remove_prefix(std::min<size_t>(bytes.size(), kBlockBytes))) {
    sums.blocks.push_back(offload::Crc32c(bytes.substr(0, kBlockBytes)));
  }
  return sums;
}

class CombinePiecesTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(CombinePiecesTest, RandomCutsInAnyOrder) {
  std::mt19937 random(7);
  const std::string bytes = RandomBytes(GetParam(), 1);
  for (int round = 0; round < 5; ++round) {
    std::vector<Piece> pieces;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size =
          random() % 2 == 0 ? random() % 5000 : random() % (2 * kBlockBytes);
      std::vector<Piece> more;
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

INSTANTIATE_TEST_SUITE_P(Sizes, CombinePiecesTest,
                         ::testing::Values(0, 1, 4096, kBlockBytes - 1,
                                           kBlockBytes, kBlockBytes + 1,
                                           3 * kBlockBytes + 10007));

TEST(ChecksumsTest, WhatContinuesIsOnePiece) {
  const std::string bytes = RandomBytes(kBlockBytes + 100, 3);
  const absl::string_view whole = bytes;
  std::vector<Piece> pieces;
  AppendPieces(2, 0, whole.substr(0, 10), pieces);
  AppendPieces(2, 10, whole.substr(10, kBlockBytes), pieces);
  AppendPieces(2, kBlockBytes + 10, whole.substr(kBlockBytes + 10), pieces);
  ASSERT_EQ(pieces.size(), 2);
  EXPECT_EQ(pieces[0], (Piece{2, 0, kBlockBytes,
                              offload::Crc32c(whole.substr(0, kBlockBytes))}));
  EXPECT_EQ(pieces[1], (Piece{2, kBlockBytes, 100,
                              offload::Crc32c(whole.substr(kBlockBytes))}));
}

TEST(ChecksumsTest, GapsAndOverlapsAreNamed) {
  const std::vector<NamedSize> files = {{"a", 10}, {"b", 2 * kBlockBytes}};
  struct Case {
    std::vector<Piece> pieces;
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

using ::fsdp::offload::Crc32c;

TEST(Crc32cCombineTest, IsThatOfTheWhole) {
  const int64_t sizes[] = {0, 1, 2, 3, 7, 4093, 4096, 65537, 1 << 20};
  for (const int64_t first : sizes) {
    for (const int64_t second : sizes) {
      const std::string bytes = RandomBytes(first + second, first + 1);
      const absl::string_view whole = bytes;
      EXPECT_EQ(Crc32cCombine(Crc32c(whole.substr(0, first)),
                              Crc32c(whole.substr(first)), second),
                Crc32c(whole))
          << first << " and " << second;
    }
  }
}

TEST(Crc32cCombineTest, HugeSizesAreSumsOfSmallOnes) {
  for (const int64_t size :
       {int64_t{1} << 28, int64_t{1} << 29, int64_t{5} << 33,
        (int64_t{1} << 47) + 12345, std::numeric_limits<int64_t>::max()}) {
    const int64_t half = size / 3;
    // The checksum of "a" is only shifted by the zeros behind it.
    const uint32_t at_once = Crc32cCombine(Crc32c("a"), 0, size);
    const uint32_t twice =
        Crc32cCombine(Crc32cCombine(Crc32c("a"), 0, half), 0, size - half);
    EXPECT_EQ(at_once, twice) << size;
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
