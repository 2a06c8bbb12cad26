// Layouts of gradients, compared with a slow reference that deals elements out
// to ranks one by one, on a device, and changes of what is trained.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/testing/runtime_unit.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatLayout;
using ::fsdp::flat_param::FlatParameter;
using ::fsdp::flat_param::ParameterSpec;
using ::fsdp::flat_param::Slice;
using ::testing::ElementsAre;

using Tensors = std::vector<at::Tensor>;

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

constexpr int kNumParameters = 5;
constexpr int64_t kSizes[] = {6, 5, 1, 9, 4};

// One rank of a unit with these parameters.
class Unit {
 public:
  Unit(int world_size, int rank, c10::Device device = at::kCPU,
       GradientBufferOptions options = {at::kFloat, at::kFloat, {0.5, 1}})
      : device_(device),
        flat_(Make(world_size, rank, device)),
        gradients_(flat_.get(), std::move(options)) {}

  FlatGradients& gradients() { return gradients_; }
  void Freeze(int i) { Slice(i).set_requires_grad(false); }
  at::Tensor Slice(int i) const { return flat_->ShardSlice(i); }
  const at::Tensor& Grad(int i) const { return flat_->ShardSlice(i).grad(); }

  // Parameter i has a gradient if bit i of `mask` is set.
  Tensors Gradients(unsigned mask, float first) const {
    Tensors gradients(kNumParameters);
    for (int i = 0; i < kNumParameters; ++i) {
      if ((mask >> i & 1) == 0) continue;
      gradients[i] = at::arange(kSizes[i], at::kFloat)
                         .add(first + 10 * static_cast<float>(i))
                         .to(device_);
    }
    return gradients;
  }
  // Returns a buffer that held other numbers and is filled twice.
  ReduceBuffer Filled(unsigned first, unsigned second) {
    ReduceBuffer buffer = Empty();
    gradients_.Fill(buffer, Gradients(first, 1));
    gradients_.Add(buffer, Gradients(second, 300));
    return buffer;
  }
  // Returns a buffer for what is trained, with other numbers in it.
  ReduceBuffer Empty() const {
    ReduceBuffer buffer;
    buffer.layout = gradients_.CurrentLayout();
    buffer.memory = at::full({buffer.layout->bytes()}, 255,
                             at::TensorOptions(at::kByte).device(device_));
    return buffer;
  }
  void ZeroGrad() {
    for (int i = 0; i < kNumParameters; ++i) Slice(i).mutable_grad().reset();
  }

 private:
  static std::unique_ptr<FlatParameter> Make(int world_size, int rank,
                                             c10::Device device) {
    Tensors tensors;
    for (int64_t size : kSizes) {
      tensors.push_back(at::zeros({size}, at::TensorOptions().device(device)));
    }
    return FlatOf(tensors, world_size, rank);
  }

  const c10::Device device_;
  const std::unique_ptr<FlatParameter> flat_;
  FlatGradients gradients_;
};

TEST(GradientChangesTest, ADevicePacksWhatTheHostCopiesOneByOne) {
  FakeDevice::Register();
  for (int world_size : {1, 2, 3}) {
    for (int frozen : {-1, 1}) {
      Unit on_host(world_size, 0);
      Unit on_device(world_size, 0, FakeDevice::device());
      for (Unit* unit : {&on_host, &on_device}) {
        if (frozen >= 0) unit->Freeze(frozen);
      }
      for (unsigned first = 0; first < 1u << kNumParameters; ++first) {
        for (unsigned second : {0u, 9u, 22u}) {
          const ReduceBuffer expected = on_host.Filled(first, second);
          const ReduceBuffer packed = on_device.Filled(first, second);
          ASSERT_TRUE(at::equal(packed.memory.cpu(), expected.memory))
              << world_size << " ranks, " << frozen << " is frozen, " << first
              << " and then " << second;
          EXPECT_EQ(packed.produced, expected.produced);
        }
      }
    }
  }
}

TEST(GradientChangesTest, ADirectReductionOfOthersWaitsForThoseUnderWay) {
  Unit unit(2, 0);
  const auto all = unit.gradients().CurrentLayout();
  const auto first = unit.gradients().StartDirect(all).value();
  ASSERT_TRUE(first);
  EXPECT_FALSE(first->sum.accumulate);
  first->out.fill_(1);
  const auto second = unit.gradients().StartDirect(all).value();
  ASSERT_TRUE(second);
  EXPECT_TRUE(second->sum.accumulate);
  second->out.add_(2);
  unit.Freeze(1);
  const auto fewer = unit.gradients().CurrentLayout();
  EXPECT_FALSE(unit.gradients().StartDirect(fewer).value());
  unit.gradients().FinishDirect({true, true, true, true, true});
  unit.gradients().FinishDirect({true, true, true, true, true});
  const at::Tensor before = unit.Grad(0).clone();
  EXPECT_TRUE(before.eq(3).all().item<bool>());
  const auto third = unit.gradients().StartDirect(fewer).value();
  ASSERT_TRUE(third);
  EXPECT_TRUE(third->sum.accumulate);
  EXPECT_TRUE(unit.Grad(0).equal(before));
}

TEST(GradientChangesTest, AfterAFailureADirectReductionLeavesNothingBehind) {
  Unit unit(2, 0);
  const auto layout = unit.gradients().CurrentLayout();
  const auto target = unit.gradients().StartDirect(layout).value();
  ASSERT_TRUE(target);
  unit.gradients().ForgetDirect();
  EXPECT_FALSE(unit.gradients().DropUnused().defined());
  const auto next = unit.gradients().StartDirect(layout).value();
  ASSERT_TRUE(next);
  EXPECT_FALSE(next->sum.accumulate);
  EXPECT_NE(next->out.data_ptr(), target->out.data_ptr());
}

TEST(GradientChangesTest, WhatIsFrozenKeepsItsGradientAndTheRestStaysTogether) {
  Unit unit(1, 0);
  const auto firsts = [&] {
    std::vector<float> values;
    values.reserve(kNumParameters);
    for (int i = 0; i < kNumParameters; ++i) {
      values.push_back(unit.Grad(i)[0].item<float>());
    }
    return values;
  };
  ASSERT_OK(unit.gradients().AccumulateMean(unit.Filled(31, 0)));
  EXPECT_THAT(firsts(), ElementsAre(0.5, 5.5, 10.5, 15.5, 20.5));
  unit.Freeze(0);
  unit.Freeze(2);
  ASSERT_OK(unit.gradients().AccumulateMean(unit.Filled(31, 0)));
  EXPECT_THAT(firsts(), ElementsAre(0.5, 11, 10.5, 31, 41));
  EXPECT_TRUE(unit.Grad(1).is_alias_of(unit.Grad(3)));
  EXPECT_TRUE(unit.Grad(1).is_alias_of(unit.Grad(4)));
  EXPECT_FALSE(unit.Grad(1).is_alias_of(unit.Grad(0)));
  EXPECT_FALSE(unit.Grad(1).is_alias_of(unit.Grad(2)));
}

// A parameter without a gradient on any rank has none afterwards.
TEST(GradientChangesTest, WhatWasProducedIsKnownInAnotherLayout) {
  Unit unit(1, 0);
  unit.Freeze(4);
  const ReduceBuffer fewer = unit.Filled(0b0101, 0b0001);
  unit.Slice(4).set_requires_grad(true);
  ReduceBuffer all = unit.Empty();
  unit.gradients().Convert(fewer, all);
  EXPECT_THAT(all.produced, ElementsAre(true, false, true, false, false));
  unit.gradients().AddSegment(fewer, all);
  EXPECT_THAT(all.produced, ElementsAre(true, false, true, false, false));
  ReduceBuffer sum = unit.Filled(0b1000, 0);
  unit.gradients().AddSegment(all, sum);
  EXPECT_THAT(sum.produced, ElementsAre(true, false, true, true, false));
  ASSERT_OK(unit.gradients().AccumulateMean(all));
  const at::Tensor once = at::arange(6, at::kFloat).add(1).div(2);
  EXPECT_TRUE(unit.Grad(0).equal(2 * (once + at::arange(6).add(300).div(2))));
  EXPECT_FALSE(unit.Grad(1).defined());
  EXPECT_TRUE(unit.Grad(2).equal(at::full({1}, 21.0f)));
  EXPECT_FALSE(unit.Grad(4).defined());
}

// Compares with a buffer that has had the other layout from the start.
TEST(GradientChangesTest, OwnSegmentsAreConvertedAndAddedAlone) {
  for (int rank : {0, 1, 2}) {
    Unit unit(3, rank);
    const ReduceBuffer expected = unit.Filled(0b0101, 0b0011);
    unit.Freeze(3);
    const ReduceBuffer fewer = unit.Filled(0b0101, 0b0011);
    unit.Slice(3).set_requires_grad(true);

    ReduceBuffer segment = unit.Empty();
    segment.is_segment = true;
    segment.memory = segment.memory.narrow(0, 0, expected.layout->bytes() / 3);
    unit.gradients().Convert(fewer, segment);
    const at::Tensor own = unit.gradients().OwnSegment(expected);
    EXPECT_TRUE(at::equal(unit.gradients().OwnSegment(segment), own)) << rank;
    unit.gradients().AddSegment(fewer, segment);
    EXPECT_TRUE(at::equal(unit.gradients().OwnSegment(segment), 2 * own))
        << rank;

    ReduceBuffer whole = unit.Filled(0b0101, 0b0011);
    unit.gradients().AddSegment(fewer, whole);
    const int64_t numel = own.numel();
    const at::Tensor doubled = unit.gradients().Whole(expected).clone();
    doubled.narrow(0, rank * numel, numel).mul_(2);
    EXPECT_TRUE(at::equal(unit.gradients().Whole(whole), doubled)) << rank;
  }
}

TEST(GradientChangesTest, AGradientThatTheUserKeepsIsNotWrittenAgain) {
  Unit unit(1, 0);
  ASSERT_OK(unit.gradients().AccumulateMean(unit.Filled(31, 0)));
  const at::Tensor kept = unit.Grad(1);
  const at::Tensor before = kept.clone();
  unit.ZeroGrad();
  ASSERT_OK(unit.gradients().AccumulateMean(unit.Filled(31, 31)));
  EXPECT_TRUE(kept.equal(before));
  EXPECT_FALSE(unit.Grad(1).equal(before));
  // Memory that nobody keeps is reused.
  const void* const data = unit.Grad(0).data_ptr();
  unit.ZeroGrad();
  ASSERT_OK(unit.gradients().AccumulateMean(unit.Filled(31, 0)));
  EXPECT_EQ(unit.Grad(0).data_ptr(), data);
}

// fp16 cannot hold 1e5, but it holds a quarter of it.
TEST(GradientChangesTest, ScalingComesFirstWhereTheBufferHasLessRange) {
  Unit unit(1, 0, at::kCPU, {at::kHalf, at::kFloat, {0.25, 4}});
  Tensors gradients;
  for (int64_t size : kSizes) {
    gradients.push_back(at::full({size}, 1e5, at::kBFloat16));
  }
  ReduceBuffer buffer = unit.Empty();
  unit.gradients().Fill(buffer, gradients);
  ASSERT_OK(unit.gradients().AccumulateMean(buffer));
  EXPECT_TRUE(at::allclose(unit.Grad(0), at::full({6}, 1e5f), 0.01));
}

}  // namespace
}  // namespace fsdp::testing
