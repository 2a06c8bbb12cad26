#include "checkpoint/format/tensor_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 4;

TEST(DtypeTest, EachHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_TRUE(names.insert(std::string(NameOf(dtype))).second);
    EXPECT_EQ(DtypeNamed(NameOf(dtype)), dtype);
  }
  EXPECT_FALSE(DtypeNamed("F31").has_value());
  EXPECT_FALSE(DtypeNamed("").has_value());
}

// The digits in a name are its bits.
TEST(DtypeTest, BitsAreThoseOfTheName) {
  for (int i = 0; i < kNumDtypes; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    const std::string name(NameOf(dtype));
    const size_t digits = name.find_first_of("0123456789");
    const int bits = digits == std::string::npos
                         ? 8  // BOOL
                         : std::stoi(name.substr(digits));
    EXPECT_EQ(BitsOf(dtype), bits) << name;
    EXPECT_EQ(ItemBytes(dtype), bits % 8 == 0 ? bits / 8 : 0) << name;
  }
}

TEST(TensorInfoTest, Bytes) {
  EXPECT_EQ(*BytesOf({"scalar", Dtype::kF64, {}}), 8);
  EXPECT_EQ(*BytesOf({"empty", Dtype::kF32, {3, 0, 5}}), 0);
  EXPECT_EQ(*BytesOf({"prime", Dtype::kBF16, {7, 11}}), 154);
  EXPECT_EQ(*BytesOf({"packed", Dtype::kF4, {2, 3}}), 3);
  EXPECT_EQ(*BytesOf({"six bits", Dtype::kF6E2M3, {4}}), 3);
}

TEST(TensorInfoTest, WhatCannotBeIsNamed) {
  EXPECT_THAT(BytesOf({"w", Dtype::kF4, {3}}).status().message(),
              HasSubstr("tensor \"w\", F4[3]: does not come to whole bytes"));
  EXPECT_EQ(BytesOf({"w", Dtype::kF32, {2, -1}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  // A zero does not hide a negative size, and no product overflows before it.
  EXPECT_FALSE(NumelOf({"w", Dtype::kU8, {0, -1}}).ok());
  EXPECT_EQ(*NumelOf({"w", Dtype::kU8, {kHuge, kHuge, 0}}), 0);
  EXPECT_FALSE(NumelOf({"w", Dtype::kU8, {kHuge, 5}}).ok());
  EXPECT_FALSE(BytesOf({"w", Dtype::kF32, {kHuge}}).ok());
}

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Shape = std::vector<int64_t>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

int64_t Numel(const Shape& shape) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  return numel;
}

// The row-major indices of a box's elements in its own order, one by one.
std::vector<int64_t> ElementsOf(const Shape& shape, const Box& box) {
  std::vector<int64_t> elements;
  for (int64_t flat = 0; flat < Numel(shape); ++flat) {
    int64_t rest = flat;
    bool inside = true;
    for (size_t i = shape.size(); i-- > 0;) {
      const int64_t at = rest % shape[i] - box.offsets[i];
      inside &= at >= 0 && at < box.sizes[i];
      rest /= shape[i];
    }
    if (inside) elements.push_back(flat);
  }
  return elements;
}

Shape RandomShape(std::mt19937& random) {
  Shape shape(random() % 5);
  for (int64_t& size : shape) {
    constexpr int64_t kSizes[] = {1, 1, 2, 3, 4, 5};
    size = kSizes[random() % 6];
  }
  return shape;
}

TEST(RangeToBoxesTest, KnownCuts) {
  EXPECT_THAT(RangeToBoxes({}, 0, 1), ElementsAre(Box{{}, {}}));
  EXPECT_THAT(RangeToBoxes({}, 0, 0), IsEmpty());
  EXPECT_THAT(RangeToBoxes({0, 3}, 0, 0), IsEmpty());
  EXPECT_THAT(RangeToBoxes({7}, 2, 5), ElementsAre(Box{{2}, {3}}));
  EXPECT_THAT(RangeToBoxes({4, 5}, 5, 15), ElementsAre(Box{{1, 0}, {2, 5}}));
  EXPECT_THAT(RangeToBoxes({4, 5}, 3, 16),
              ElementsAre(Box{{0, 3}, {1, 2}}, Box{{1, 0}, {2, 5}},
                          Box{{3, 0}, {1, 1}}));
  EXPECT_THAT(RangeToBoxes({3, 3, 3}, 1, 26),
              ElementsAre(Box{{0, 0, 1}, {1, 1, 2}}, Box{{0, 1, 0}, {1, 2, 3}},
                          Box{{1, 0, 0}, {1, 3, 3}}, Box{{2, 0, 0}, {1, 2, 3}},
                          Box{{2, 2, 0}, {1, 1, 2}}));
}

TEST(RangeToBoxesTest, EveryRangeOfManyShapes) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const Shape shape = RandomShape(random);
    const int64_t numel = Numel(shape);
    for (int64_t begin = 0; begin <= numel; begin += 1 + numel / 20) {
      for (int64_t end = begin; end <= numel; end += 1 + numel / 20) {
        std::vector<int64_t> elements;
        const std::vector<Box> boxes = RangeToBoxes(shape, begin, end);
        for (const Box& box : boxes) {
          ASSERT_OK(CheckInBounds(shape, box));
          for (const int64_t element : ElementsOf(shape, box)) {
            elements.push_back(element);
          }
        }
        std::vector<int64_t> expected;
        for (int64_t i = begin; i < end; ++i) expected.push_back(i);
        ASSERT_EQ(elements, expected) << absl::StrJoin(shape, "x");
        ASSERT_LE(boxes.size(), std::max<size_t>(1, 2 * shape.size() - 1));
      }
    }
  }
}

TEST(BoxTest, Numel) {
  EXPECT_EQ(Box{}.Numel(), 1);
  EXPECT_EQ((Box{{0, 0}, {3, 5}}).Numel(), 15);
  EXPECT_EQ((Box{{0, 0, 0}, {INT64_MAX, INT64_MAX, 0}}).Numel(), 0);
}

TEST(CheckInBoundsTest, NamesTheBox) {
  EXPECT_OK(CheckInBounds({}, {}));
  EXPECT_OK(CheckInBounds({3, 0}, {{3, 0}, {0, 0}}));
  constexpr int64_t kMost = INT64_MAX;
  const std::vector<Box> outside = {
      {{0}, {3}},           {{0, 0}, {3}},           {{0, -1}, {1, 1}},
      {{0, 0}, {1, -1}},    {{2, 0}, {2, 1}},        {{4, 0}, {0, 0}},
      {{1, 0}, {kMost, 1}}, {{kMost, 0}, {kMost, 1}}};
  for (const Box& box : outside) {
    EXPECT_THAT(CheckInBounds({3, 5}, box),
                StatusIs(kInvalid, HasSubstr("does not lie inside")));
  }
  EXPECT_THAT(CheckInBounds({3, 5}, outside[4]),
              StatusIs(kInvalid, HasSubstr("a piece of [2, 1] at [2, 0]")));
}

// Pieces of a tensor, cut at random places again and again.
std::vector<Box> RandomTiles(std::mt19937& random, const Shape& shape) {
  std::vector<Box> tiles = {{Shape(shape.size(), 0), shape}};
  for (int cut = 0; cut < 8 && !shape.empty(); ++cut) {
    const size_t which = random() % tiles.size();
    const size_t dim = random() % shape.size();
    Box& tile = tiles[which];
    if (tile.sizes[dim] < 2) continue;
    const auto keep =
        1 + static_cast<int64_t>(random() % (tile.sizes[dim] - 1));
    Box rest = tile;
    rest.offsets[dim] += keep;
    rest.sizes[dim] -= keep;
    tile.sizes[dim] = keep;
    tiles.push_back(rest);
  }
  std::shuffle(tiles.begin(), tiles.end(), random);
  return tiles;
}

// The first element whose number of boxes is not 1; -1 if there is none.
int64_t FirstWrong(const Shape& shape, const std::vector<Box>& boxes) {
  std::vector<int> counts(Numel(shape), 0);
  for (const Box& box : boxes) {
    for (const int64_t element : ElementsOf(shape, box)) ++counts[element];
  }
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] != 1) return static_cast<int64_t>(i);
  }
  return -1;
}

std::string PointOf(const Shape& shape, int64_t flat) {
  Shape point(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    point[i] = flat % shape[i];
    flat /= shape[i];
  }
  return absl::StrCat("element [", absl::StrJoin(point, ", "), "] ");
}

TEST(CheckTilesTest, FindsTheFirstElementThatIsNotInOnePiece) {
  std::mt19937 random(2);
  int good = 0;
  for (int round = 0; round < 3000; ++round) {
    const Shape shape = RandomShape(random);
    std::vector<Box> boxes = RandomTiles(random, shape);
    // Sometimes moved, dropped, twice, or grown.
    Box& one = boxes[random() % boxes.size()];
    if (random() % 2 == 0 && !shape.empty()) {
      const size_t dim = random() % shape.size();
      Box changed = one;
      switch (random() % 4) {
        case 0:
          changed.offsets[dim] += random() % 2 == 0 ? 1 : -1;
          break;
        case 1:
          changed.sizes[dim] += random() % 2 == 0 ? 1 : -1;
          break;
        case 2:
          boxes.push_back(changed);
          break;
        default:
          changed.sizes[dim] = 0;
      }
      if (CheckInBounds(shape, changed).ok()) boxes.front() = changed;
    }
    const int64_t wrong = FirstWrong(shape, boxes);
    if (wrong < 0) {
      ++good;
      ASSERT_OK(CheckTiles(shape, boxes));
    } else {
      ASSERT_THAT(CheckTiles(shape, boxes),
                  StatusIs(kInvalid, HasSubstr(PointOf(shape, wrong))));
    }
  }
  EXPECT_GT(good, 500);
  EXPECT_LT(good, 2500);
}

TEST(CheckTilesTest, SaysWhatIsWrong) {
  EXPECT_OK(CheckTiles({0, 2}, {}));
  // Pieces without elements do not matter.
  EXPECT_OK(CheckTiles({2}, {{{0}, {2}}, {{2}, {0}}, {{2}, {0}}}));
  EXPECT_THAT(CheckTiles({}, {}),
              StatusIs(kInvalid, HasSubstr("element [] is in none")));
  const Box all{{0, 0}, {2, 2}};
  EXPECT_THAT(CheckTiles({2, 2}, {all, all, all}),
              StatusIs(kInvalid, HasSubstr("[0, 0] is in 3 of its pieces")));
  EXPECT_THAT(CheckTiles({2, 2}, {{{0, 0}, {2, 1}}, {{0, 1}, {1, 1}}}),
              StatusIs(kInvalid, HasSubstr("[1, 1] is in none")));
}

// A matrix of a thousand pieces each way, which a check of all pairs would be
// busy with for minutes.
TEST(CheckTilesTest, AMillionPieces) {
  constexpr int64_t kPieces = 1000;
  std::vector<Box> boxes;
  for (int64_t i = 0; i < kPieces; ++i) {
    for (int64_t j = 0; j < kPieces; ++j) {
      boxes.push_back({{3 * i, 5 * j}, {3, 5}});
    }
  }
  EXPECT_OK(CheckTiles({3 * kPieces, 5 * kPieces}, boxes));
  boxes[kPieces].sizes[0] = 4;
  EXPECT_THAT(CheckTiles({3 * kPieces, 5 * kPieces}, boxes),
              StatusIs(kInvalid, HasSubstr("element [6, 0] is in 2")));
}

// Each column is cut at another row.
TEST(CheckTilesTest, TooMuchWorkIsRefused) {
  constexpr int64_t kColumns = 4000;
  std::vector<Box> boxes;
  for (int64_t i = 0; i < kColumns; ++i) {
    boxes.push_back({{0, i}, {i + 1, 1}});
    boxes.push_back({{i + 1, i}, {kColumns - i, 1}});
  }
  EXPECT_THAT(CheckTiles({kColumns + 1, kColumns}, boxes),
              StatusIs(kInvalid, HasSubstr("8000 pieces are more than can")));
}

}  // namespace
}  // namespace fsdp::checkpoint
