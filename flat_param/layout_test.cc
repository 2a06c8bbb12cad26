#include "flat_param/layout.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <numeric>
#include <ostream>
#include <random>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp::flat_param {

void PrintTo(const Slice& slice, std::ostream* os) {
  *os << "[" << slice.begin << ", " << slice.end << ")";
}

namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

// A contiguous parameter.
ParameterSpec Contiguous(std::string name, std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return {std::move(name), std::move(sizes), std::move(strides)};
}

int64_t NumElements(const ParameterSpec& spec) {
  return std::accumulate(spec.sizes.begin(), spec.sizes.end(), int64_t{1},
                         std::multiplies<>());
}

TEST(FlatLayoutTest, MayHoldNothing) {
  ASSERT_OK_AND_ASSIGN(const FlatLayout none, FlatLayout::Create({}, 4, 3));
  EXPECT_EQ(none.padded_numel(), 0);
  EXPECT_EQ(none.ShardRange(2), (Slice{0, 0}));

  ASSERT_OK_AND_ASSIGN(
      const FlatLayout empty,
      FlatLayout::Create({{"empty", {kHuge, kHuge, 0}, {0, 1, 1}}}, 4, 3));
  EXPECT_EQ(empty.padded_numel(), 0);
  EXPECT_EQ(empty.InShard(0, 2), (Slice{0, 0}));
}

TEST(FlatLayoutTest, AcceptsTheStridesOfDenseTensors) {
  const std::vector<ParameterSpec> dense = {
      {"transposed", {3, 4}, {1, 3}},
      {"channels_last", {2, 3, 4, 5}, {60, 1, 15, 3}},
      {"one_channel", {2, 1, 4, 5}, {20, 77, 5, 1}},
      {"single", {1, 1}, {0, 9}},
      {"scalar", {}, {}},
      {"empty", {0, 4}, {9, 9}},
  };
  ASSERT_OK_AND_ASSIGN(const FlatLayout layout,
                       FlatLayout::Create(dense, 4, 2));
  for (int i = 0; i < layout.num_parameters(); ++i) {
    EXPECT_EQ(layout.parameter(i).strides, dense[i].strides);
    EXPECT_EQ(layout.InFlat(i).numel(), NumElements(dense[i]));
  }
}

TEST(FlatLayoutTest, RefusesANameTwice) {
  EXPECT_THAT(
      FlatLayout::Create({Contiguous("w", {2}), Contiguous("w", {3})}, 4, 2),
      StatusIs(Code::kInvalidArgument,
               AllOf(HasSubstr("'w'"), HasSubstr("listed twice"))));
}

TEST(FlatLayoutTest, RefusesWhatOverflows) {
  const auto refuses = [](std::vector<ParameterSpec> specs,
                          int64_t element_size, int world_size) {
    EXPECT_THAT(FlatLayout::Create(std::move(specs), element_size, world_size),
                StatusIs(Code::kInvalidArgument,
                         AllOf(HasSubstr("'w'"), HasSubstr("larger than"))));
  };
  const int64_t half = int64_t{1} << 62;
  refuses({{"w", {half, 2}, {2, 1}}}, 1, 1);                // its elements
  refuses({{"w", {kHuge}, {1}}}, 1, 1);                     // its padding
  refuses({{"w", {half}, {1}}}, 2, 1);                      // its bytes
  refuses({{"a", {half}, {1}}, {"w", {half}, {1}}}, 1, 1);  // the sum
  refuses({{"w", {kHuge - 40}, {1}}}, 1, 1000);             // the shards
}

TEST(FlatLayoutTest, AcceptsTheLargestLayout) {
  const int64_t largest = kHuge / 16 * 16;
  ASSERT_OK_AND_ASSIGN(
      const FlatLayout layout,
      FlatLayout::Create({{"w", {largest}, {1}}}, /*element_size=*/1,
                         /*world_size=*/1));
  EXPECT_EQ(layout.padded_numel(), largest);
}

TEST(FlatLayoutTest, AnAlignmentOfOneLeavesNoPaddingBetweenParameters) {
  ASSERT_OK_AND_ASSIGN(
      const FlatLayout layout,
      FlatLayout::Create({Contiguous("a", {3}), Contiguous("b", {2})},
                         /*element_size=*/4, /*world_size=*/1,
                         /*alignment_bytes=*/1));
  EXPECT_EQ(layout.InFlat(1), (Slice{3, 5}));
  EXPECT_EQ(layout.padded_numel(), 5);
}

TEST(FlatLayoutDeathTest, StopsOnWhatNoTensorHas) {
  const ParameterSpec bad[] = {
      {"w", {3, 4}, {8, 1}},  // gaps
      {"w", {3, 4}, {0, 1}},  // expanded
      {"w", {3, 4}, {2, 1}},  // overlaps
      {"w", {3}, {-1}},       // reversed
      {"w", {2, 2}, {1, 1}},  // equal strides
      {"w", {2, 2}, {kHuge, 1}}, {"w", {2, -1}, {1, 1}}, {"w", {2, 3}, {1}},
  };
  for (const ParameterSpec& spec : bad) {
    EXPECT_DEATH(FlatLayout::Create({spec}, 4, 2).status().IgnoreError(),
                 "broken invariant");
  }
  for (const auto& [element_size, world_size, alignment] :
       {std::array{0, 1, 1}, {4, 0, 1}, {4, 1, 0}}) {
    EXPECT_DEATH(FlatLayout::Create({}, element_size, world_size, alignment)
                     .status()
                     .IgnoreError(),
                 "broken invariant");
  }
}

TEST(FlatLayoutDeathTest, StopsOnAnIndexOutOfRange) {
  ASSERT_OK_AND_ASSIGN(const FlatLayout layout,
                       FlatLayout::Create({Contiguous("w", {4})}, 4, 2));
  EXPECT_DEATH(layout.parameter(1), "broken invariant");
  EXPECT_DEATH(layout.InFlat(-1), "broken invariant");
  EXPECT_DEATH(layout.ShardRange(2), "broken invariant");
  EXPECT_DEATH(layout.InShard(0, -1), "broken invariant");
}

// Returns random parameters of any rank and order of dimensions, whose sizes
// are often 0, 1 or prime.
std::vector<ParameterSpec> RandomParameters(std::mt19937& random) {
  constexpr int64_t kSizes[] = {0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 11, 13};
  std::vector<ParameterSpec> parameters(random() % 12);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t rank = random() % 5;
    ParameterSpec& spec = parameters[i];
    spec.name = absl::StrCat("parameter", i);
    spec.sizes.resize(rank);
    spec.strides.resize(rank);
    std::vector<size_t> order(rank);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    int64_t stride = 1;
    for (const size_t d : order) {
      spec.sizes[d] = kSizes[random() % std::size(kSizes)];
      spec.strides[d] = stride;
      stride *= std::max<int64_t>(spec.sizes[d], 1);
    }
  }
  return parameters;
}

// The parameters are world size and element size.
class FlatLayoutPropertyTest
    : public ::testing::TestWithParam<std::tuple<int, int64_t>> {
 protected:
  // Calls `check` with many layouts of random parameters.
  template <typename Check>
  void ForRandomLayouts(Check check) {
    const auto [world_size, element_size] = GetParam();
    std::mt19937 random(20260726);
    for (int trial = 0; trial < 50; ++trial) {
      SCOPED_TRACE(absl::StrCat("trial ", trial));
      std::vector<ParameterSpec> parameters = RandomParameters(random);
      ASSERT_OK_AND_ASSIGN(
          const FlatLayout layout,
          FlatLayout::Create(parameters, element_size, world_size));
      check(layout);
      if (HasFailure()) return;
    }
  }
};

TEST_P(FlatLayoutPropertyTest, ParametersAreAlignedAndPackedTightly) {
  ForRandomLayouts([](const FlatLayout& layout) {
    const int64_t element_size = layout.element_size();
    int64_t numel = 0;
    int64_t end = 0;
    for (int i = 0; i < layout.num_parameters(); ++i) {
      const Slice slice = layout.InFlat(i);
      EXPECT_EQ(slice.numel(), NumElements(layout.parameter(i)));
      EXPECT_EQ(slice.begin * element_size % FlatLayout::kAlignmentBytes, 0);
      EXPECT_GE(slice.begin, end);
      EXPECT_LT(slice.begin - end, FlatLayout::kAlignmentBytes);
      numel += slice.numel();
      end = slice.end;
    }
    EXPECT_EQ(layout.numel(), numel);
    EXPECT_GE(layout.padded_numel(), end);
  });
}

TEST_P(FlatLayoutPropertyTest, ShardsAreEqualAlignedAndLeast) {
  ForRandomLayouts([](const FlatLayout& layout) {
    const int64_t shard_bytes = layout.shard_numel() * layout.element_size();
    EXPECT_EQ(shard_bytes % FlatLayout::kAlignmentBytes, 0);
    int64_t end = 0;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      EXPECT_EQ(layout.ShardRange(rank),
                (Slice{end, end + layout.shard_numel()}));
      end += layout.shard_numel();
    }
    EXPECT_EQ(layout.padded_numel(), end);
    // One aligned step less per shard would not hold the parameters.
    const int64_t step =
        std::lcm(FlatLayout::kAlignmentBytes, layout.element_size()) /
        layout.element_size();
    if (layout.shard_numel() > 0) {
      EXPECT_LT((layout.shard_numel() - step) * layout.world_size(),
                layout.InFlat(layout.num_parameters() - 1).end);
    }
  });
}

TEST_P(FlatLayoutPropertyTest, FlatToShardsToFlatIsTheIdentity) {
  ForRandomLayouts([](const FlatLayout& layout) {
    // 0 is padding; every element of a parameter has its own number.
    std::vector<int64_t> flat(layout.padded_numel(), 0);
    int64_t next = 1;
    for (int i = 0; i < layout.num_parameters(); ++i) {
      const Slice slice = layout.InFlat(i);
      std::iota(flat.begin() + slice.begin, flat.begin() + slice.end, next);
      next += slice.numel();
    }
    std::vector<int64_t> copy(layout.padded_numel(), 0);
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      const Slice range = layout.ShardRange(rank);
      const std::vector<int64_t> shard(flat.begin() + range.begin,
                                       flat.begin() + range.end);
      for (int i = 0; i < layout.num_parameters(); ++i) {
        const Slice source = layout.InShard(i, rank);
        std::copy(shard.begin() + source.begin, shard.begin() + source.end,
                  copy.begin() + layout.InFlat(i).begin +
                      layout.InParameter(i, rank).begin);
      }
    }
    EXPECT_EQ(copy, flat);
  });
}

INSTANTIATE_TEST_SUITE_P(
    WorldAndElementSizes, FlatLayoutPropertyTest,
    ::testing::Combine(::testing::Values(1, 2, 3, 5, 8, 257),
                       ::testing::Values(1, 2, 3, 4, 8, 12, 16, 24)),
    [](const auto& info) {
      return absl::StrCat("World", std::get<0>(info.param), "Bytes",
                          std::get<1>(info.param));
    });

}  // namespace
}  // namespace fsdp::flat_param
