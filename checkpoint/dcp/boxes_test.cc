#include "checkpoint/dcp/boxes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

using Sizes = std::vector<int64_t>;

int64_t Product(const Sizes& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

// The elements of a box, as row-major numbers.
Sizes Elements(const Sizes& shape, const DcpBox& box) {
  Sizes elements;
  for (int64_t i = 0; i < Product(shape); ++i) {
    int64_t left = i;
    bool is_inside = true;
    for (size_t dim = shape.size(); dim-- > 0;) {
      const int64_t at = left % shape[dim];
      left /= shape[dim];
      is_inside &=
          at >= box.offsets[dim] && at < box.offsets[dim] + box.sizes[dim];
    }
    if (is_inside) elements.push_back(i);
  }
  return elements;
}

const Sizes kShapes[] = {{},        {1},       {7},         {3, 5},
                         {1, 1, 4}, {2, 3, 4}, {3, 1, 2, 2}};

TEST(RangeToBoxesTest, EveryRangeOfSmallShapes) {
  for (const Sizes& shape : kShapes) {
    const int64_t numel = Product(shape);
    for (int64_t begin = 0; begin <= numel; ++begin) {
      for (int64_t end = begin; end <= numel; ++end) {
        int64_t at = begin;
        size_t count = 0;
        for (const DcpBox& box : RangeToBoxes(shape, begin, end)) {
          for (const DcpBox& piece : SplitBox(shape, box, 3)) {
            EXPECT_LE(piece.Numel(), 3);
            for (const int64_t element : Elements(shape, piece)) {
              ASSERT_EQ(element, at++);
            }
          }
          ++count;
        }
        EXPECT_EQ(at, end);
        EXPECT_LE(count, shape.empty() ? 1 : 2 * shape.size() - 1);
      }
    }
  }
}

TEST(CheckCoverTest, RangesOfAllCutsCover) {
  for (const Sizes& shape : kShapes) {
    const int64_t numel = Product(shape);
    for (int64_t cut = 0; cut <= numel; ++cut) {
      std::vector<DcpBox> boxes = RangeToBoxes(shape, 0, cut);
      for (const DcpBox& box : RangeToBoxes(shape, cut, numel)) {
        boxes.push_back(box);
      }
      EXPECT_OK(CheckCover(shape, boxes));
      if (boxes.size() < 2) continue;
      // One is there twice instead of another, one is missing, one too many.
      std::vector<DcpBox> twice = boxes;
      twice[0] = twice[1];
      EXPECT_FALSE(CheckCover(shape, twice).ok());
      boxes.push_back(boxes[0]);
      EXPECT_FALSE(CheckCover(shape, boxes).ok());
      boxes.resize(boxes.size() - 2);
      EXPECT_FALSE(CheckCover(shape, boxes).ok());
    }
  }
}

TEST(CheckCoverTest, Texts) {
  EXPECT_THAT(CheckCover({4}, {{{0}, {3}}, {{2}, {1}}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("each element exactly once")));
  EXPECT_THAT(CheckCover({4}, {{{2}, {3}}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("chunk [3] at [2] is not inside of it")));
  EXPECT_FALSE(CheckCover({4}, {{{0, 0}, {4, 1}}}).ok());
  EXPECT_FALSE(CheckCover({4}, {}).ok());
  EXPECT_OK(CheckCover({0, 3}, {}));
  EXPECT_OK(CheckCover({2}, {{{0}, {2}}, {{2}, {0}}, {{2}, {0}}}));
  EXPECT_OK(CheckCover({}, {{{}, {}}}));
  const std::vector<DcpBox> many = {{Sizes(7, 0), Sizes(7, 1)}};
  EXPECT_THAT(CheckCover(Sizes(7, 2), many),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("split 7 dimensions; 6 are read")));
}

// What takes torch more than 200 s by comparing pairs.
TEST(CheckCoverTest, AMillionChunks) {
  std::vector<DcpBox> boxes;
  for (int64_t row = 0; row < 1024; ++row) {
    for (int64_t column = 0; column < 1024; ++column) {
      boxes.push_back({{row, column * 3}, {1, 3}});
    }
  }
  EXPECT_OK(CheckCover({1024, 3 * 1024}, boxes));
}

}  // namespace
}  // namespace fsdp::checkpoint
