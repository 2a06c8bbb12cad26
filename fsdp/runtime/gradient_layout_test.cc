// Compares with a slow reference that deals elements out to ranks one by one.
#include "fsdp/runtime/gradient_layout.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "flat_param/layout.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;

FlatLayout LayoutOf(const std::vector<int64_t>& sizes, int64_t element_size,
                    int world_size) {
  std::vector<ParameterSpec> specs;
  specs.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    specs.push_back({absl::StrCat("p", i), {sizes[i]}, {1}});
  }
  absl::StatusOr<FlatLayout> layout =
      FlatLayout::Create(specs, element_size, world_size);
  EXPECT_OK(layout.status());
  return *std::move(layout);
}

int64_t RoundUp(int64_t value, int64_t multiple) {
  while (value % multiple != 0) ++value;
  return value;
}

// An element of the buffer is a parameter's index, or one of these marks.
constexpr int kGap = -1;
constexpr int kFlag = -2;
constexpr int kTail = -3;

std::vector<int> Reference(const FlatLayout& layout,
                           const std::vector<bool>& trained,
                           int64_t element_size) {
  const int64_t aligned = std::max<int64_t>(1, 16 / layout.element_size());
  std::vector<std::vector<int>> segments(layout.world_size());
  size_t longest = 0;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    std::vector<int>& segment = segments[rank];
    for (int i = 0; i < layout.num_parameters(); ++i) {
      if (!trained[i]) continue;
      segment.insert(segment.end(), layout.InShard(i, rank).numel(), i);
      segment.resize(RoundUp(static_cast<int64_t>(segment.size()), aligned),
                     kGap);
    }
    longest = std::max(longest, segment.size());
  }
  const auto flags = std::count(trained.begin(), trained.end(), true);
  std::vector<int> buffer;
  for (std::vector<int>& segment : segments) {
    segment.resize(longest, kGap);
    segment.resize(longest + flags, kFlag);
    segment.resize(RoundUp(static_cast<int64_t>(segment.size()),
                           std::max<int64_t>(1, 16 / element_size)),
                   kTail);
    buffer.insert(buffer.end(), segment.begin(), segment.end());
  }
  return buffer;
}

// Returns the same from the object under test; fails if two claim an element.
std::vector<int> Actual(const GradientLayout& layout) {
  std::vector<int> buffer(layout.numel(), kTail);
  const auto claim = [&](int64_t begin, int64_t end, int what) {
    ASSERT_LE(end, layout.numel());
    for (int64_t i = begin; i < end; ++i) {
      ASSERT_EQ(buffer[i], kTail) << "element " << i;
      buffer[i] = what;
    }
  };
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const int64_t base = rank * layout.segment_numel();
    for (int i : layout.parameters()) {
      const Slice slice = layout.InSegment(i, rank);
      const Slice ranks = layout.RanksOf(i);
      EXPECT_EQ(slice.empty(), rank < ranks.begin || rank >= ranks.end);
      claim(base + slice.begin, base + slice.end, i);
    }
    const int64_t flags = base + layout.gradients_numel();
    claim(flags, flags + layout.num_flags(), kFlag);
  }
  for (const Slice& gap : layout.gaps()) claim(gap.begin, gap.end, kGap);
  return buffer;
}

TEST(GradientLayoutTest, IsTheReferenceForRandomParameters) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int turn = 0; turn < 3000; ++turn) {
    std::vector<int64_t> sizes(1 + below(7));
    for (int64_t& size : sizes) size = below(4) == 0 ? below(2) : below(70);
    std::vector<bool> trained(sizes.size());
    for (size_t i = 0; i < trained.size(); ++i) trained[i] = below(2) == 0;
    const int world_size = 1 + below(9);
    const int64_t stored = 1 << (1 + below(3));
    const int64_t reduced = 1 << (1 + below(3));
    SCOPED_TRACE(absl::StrCat("turn ", turn, ", ", world_size, " ranks"));
    const FlatLayout flat = LayoutOf(sizes, stored, world_size);
    const GradientLayout layout(flat, trained, reduced);
    ASSERT_EQ(Actual(layout), Reference(flat, trained, reduced));
    EXPECT_EQ(layout.bytes(), layout.numel() * reduced);
    EXPECT_LE(layout.gradients_numel(), flat.shard_numel());
    EXPECT_LE(layout.segment_numel() - layout.gradients_numel(),
              GradientLayout::MostFlags(flat, reduced));
  }
}

TEST(GradientLayoutTest, WithAllTrainedASegmentIsLaidOutAsTheShard) {
  for (int world_size : {1, 2, 3, 5, 8}) {
    const FlatLayout flat = LayoutOf({10, 3, 0, 61, 1, 30}, 4, world_size);
    const GradientLayout layout(flat, std::vector<bool>(6, true), 4);
    EXPECT_EQ(layout.gradients_numel(), flat.shard_numel());
    for (int rank = 0; rank < world_size; ++rank) {
      for (int i = 0; i < 6; ++i) {
        if (flat.InShard(i, rank).empty()) continue;
        EXPECT_EQ(layout.InSegment(i, rank), flat.InShard(i, rank));
      }
    }
  }
}

// The unit has two adapters of 8 elements beside a weight of 400.
TEST(GradientLayoutTest, FrozenElementsTakeNoRoom) {
  const FlatLayout flat = LayoutOf({400, 8, 8}, 4, 2);
  EXPECT_EQ(flat.shard_numel(), 208);
  EXPECT_EQ(GradientLayout(flat, {false, true, true}, 4).segment_numel(), 20);
  EXPECT_EQ(GradientLayout(flat, {true, false, false}, 4).segment_numel(), 212);
}

}  // namespace
}  // namespace fsdp::testing
