#include "ranges/tensor_range.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

using Sizes = std::vector<int64_t>;

constexpr int kWorlds[] = {1, 2, 3, 5, 8};

// A tensor whose element at a place is its row-major number, and the order of
// these in its memory, found place by place.
struct Naive {
  at::Tensor tensor;
  std::vector<int64_t> numbers;  // by position in storage order
};

// The dimension order[0] is the outermost in memory.
Naive Permuted(const Sizes& sizes, const Sizes& order) {
  Sizes strides(sizes.size());
  int64_t numel = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[order[d]] = numel;
    numel *= std::max<int64_t>(1, sizes[order[d]]);
  }
  for (const int64_t size : sizes) numel = size == 0 ? 0 : numel;
  Naive naive{at::empty_strided(sizes, strides, at::kLong), {}};
  naive.tensor.copy_(at::arange(numel, at::kLong).view(sizes));
  naive.numbers.resize(numel);
  for (int64_t number = 0; number < numel; ++number) {
    int64_t rest = number;
    int64_t position = 0;
    for (size_t d = sizes.size(); d-- > 0;) {
      position += rest % sizes[d] * strides[d];
      rest /= sizes[d];
    }
    naive.numbers[position] = number;
  }
  return naive;
}

// Sizes with 0, 1 and primes, none to four of them, in all orders.
template <typename Check>
void ForEachTensor(const Check& check) {
  const std::vector<Sizes> shapes = {
      {},        {0},          {1},         {7},       {1, 1},
      {2, 3},    {5, 1},       {1, 7},      {3, 0, 2}, {2, 3, 5},
      {7, 1, 3}, {2, 1, 3, 2}, {3, 2, 2, 1}};
  for (const Sizes& sizes : shapes) {
    Sizes order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    do {
      SCOPED_TRACE(::testing::Message()
                   << "sizes " << ::testing::PrintToString(sizes) << ", order "
                   << ::testing::PrintToString(order));
      check(Permuted(sizes, order));
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// Rank `rank` of `world`'s even part, with the values that the naive model has.
TensorRange PartOf(const Naive& naive, int rank, int world) {
  const auto [begin, end] = EvenPart(naive.numbers.size(), rank, world);
  TensorRange range{"w", naive.tensor.sizes().vec(),
                    naive.tensor.strides().vec(), begin,
                    at::full({end - begin}, -1, at::kLong)};
  for (int64_t i = begin; i < end; ++i) {
    range.values[i - begin] = naive.numbers[i];
  }
  return range;
}

std::vector<int64_t> ToVector(const at::Tensor& values) {
  const at::Tensor dense = values.contiguous();
  return {dense.data_ptr<int64_t>(), dense.data_ptr<int64_t>() + dense.numel()};
}

TEST(TensorRangeTest, EvenPartsAreContiguousAndDifferByAtMostOne) {
  for (const int world : kWorlds) {
    for (const int64_t count : {0, 1, 2, 7, 8, 13, 64, 101}) {
      int64_t next = 0;
      for (int rank = 0; rank < world; ++rank) {
        const auto [begin, end] = EvenPart(count, rank, world);
        EXPECT_EQ(begin, next);
        EXPECT_GE(end - begin, count / world);
        EXPECT_LE(end - begin, (count + world - 1) / world);
        next = end;
      }
      EXPECT_EQ(next, count);
    }
  }
}

TEST(TensorRangeTest, RowMajorIsWhatHasItsElementsInOrder) {
  ForEachTensor([](const Naive& naive) {
    TensorRange range = PartOf(naive, 0, 2);
    const bool in_order =
        std::is_sorted(naive.numbers.begin(), naive.numbers.end());
    EXPECT_EQ(range.IsRowMajor(), in_order);
    EXPECT_EQ(range.RowMajorValues().defined(), in_order);
    const TensorRange whole = WholeRange("w", naive.tensor);
    EXPECT_EQ(whole.RowMajorValues().defined(), in_order);
    range.strides = RowMajorStrides(range.sizes);
    EXPECT_TRUE(range.IsRowMajor());
    if (in_order) {
      EXPECT_EQ(ToVector(whole.RowMajorValues()), naive.numbers);
    }
  });
}

TEST(TensorRangeTest, PiecesOfAnyWorldFillThoseOfAnyOther) {
  ForEachTensor([](const Naive& naive) {
    for (const int from : kWorlds) {
      std::vector<TensorRange> pieces;
      std::vector<const TensorRange*> all;
      // The last comes first, and one twice.
      for (int rank = from; rank-- > 0;) {
        pieces.push_back(PartOf(naive, rank, from));
      }
      pieces.push_back(pieces.front());
      for (const TensorRange& piece : pieces) all.push_back(&piece);
      for (const int to : kWorlds) {
        for (int rank = 0; rank < to; ++rank) {
          const TensorRange expected = PartOf(naive, rank, to);
          TensorRange target = expected;
          target.values = at::full_like(expected.values, -1);
          ASSERT_OK(CheckCovered(all, target.begin, target.end()));
          CopyFromPieces(all, target);
          EXPECT_EQ(ToVector(target.values), ToVector(expected.values));
        }
      }
    }
  });
}

TEST(TensorRangeTest, AWholeTensorOfAnyLayoutFillsEveryRange) {
  ForEachTensor([](const Naive& naive) {
    for (const at::Tensor& tensor :
         {naive.tensor, naive.tensor.contiguous(), naive.tensor.to(at::kInt)}) {
      const TensorRange whole = WholeRange("w", tensor);
      EXPECT_OK(CheckCovered({&whole}, 0, naive.numbers.size()));
      for (int rank = 0; rank < 3; ++rank) {
        const TensorRange expected = PartOf(naive, rank, 3);
        TensorRange target = expected;
        target.values = at::full_like(expected.values, -1);
        CopyFromPieces({&whole}, target);
        EXPECT_EQ(ToVector(target.values), ToVector(expected.values));
      }
    }
  });
}

TEST(TensorRangeTest, TheFirstElementThatNoPieceHasIsNamed) {
  const Naive naive = Permuted({13}, {0});
  for (const int world : {2, 3, 5, 8}) {
    for (int gone = 0; gone < world; ++gone) {
      std::vector<TensorRange> pieces;
      std::vector<const TensorRange*> all;
      for (int rank = 0; rank < world; ++rank) {
        if (rank != gone) pieces.push_back(PartOf(naive, rank, world));
      }
      for (const TensorRange& piece : pieces) all.push_back(&piece);
      const auto [gap, gap_end] = EvenPart(13, gone, world);
      for (int64_t begin = 0; begin <= 13; ++begin) {
        for (int64_t end = begin; end <= 13; ++end) {
          const int64_t first = std::max(begin, gap);
          if (first >= std::min(end, gap_end)) {
            EXPECT_OK(CheckCovered(all, begin, end));
          } else {
            EXPECT_THAT(CheckCovered(all, begin, end),
                        StatusIs(absl::StatusCode::kNotFound,
                                 HasSubstr(absl::StrCat("element ", first))));
          }
        }
      }
    }
  }
}

TEST(TensorRangeTest, FilesHaveTheDtypeWithoutMixedPrecision) {
  TensorRange range = WholeRange("b", at::full({2}, 1, at::kHalf));
  EXPECT_EQ(range.file_dtype(), at::kHalf);
  range.dtype = at::kFloat;
  EXPECT_EQ(range.file_dtype(), at::kFloat);
  EXPECT_FALSE(WholeRange("none", at::Tensor()).values.defined());
}

}  // namespace
}  // namespace fsdp
