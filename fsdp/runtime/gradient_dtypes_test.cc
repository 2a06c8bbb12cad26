// Gradient buffers whose dtype differs from the parameters', and sums in them.
#include <ATen/ATen.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/shard_gradient.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatParameter;
using ::testing::Pair;

using Tensors = std::vector<at::Tensor>;

std::pair<double, double> DividedBy(int ranks, at::ScalarType dtype) {
  const GradientScaling scaling = MeanOver(ranks, dtype);
  return {1 / scaling.before, 1 / scaling.after};
}

TEST(MeanOverTest, DividesByAboutHalfOfTheRanksBeforeAReductionInFp16) {
  EXPECT_THAT(DividedBy(1, at::kHalf), Pair(1, 1));
  EXPECT_THAT(DividedBy(2, at::kHalf), Pair(2, 1));
  EXPECT_THAT(DividedBy(3, at::kHalf), Pair(2, 1.5));
  EXPECT_THAT(DividedBy(4, at::kHalf), Pair(2, 2));
  EXPECT_THAT(DividedBy(6, at::kHalf), Pair(4, 1.5));
  EXPECT_THAT(DividedBy(8, at::kHalf), Pair(4, 2));
  EXPECT_THAT(DividedBy(16, at::kHalf), Pair(4, 4));
}

TEST(MeanOverTest, DividesAfterAReductionInAWiderRange) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    for (const int ranks : {1, 2, 3, 7, 64}) {
      EXPECT_THAT(DividedBy(ranks, dtype), Pair(1, ranks));
    }
  }
}

// All ranks' parts of two parameters of 10 and 3 elements.
class Group {
 public:
  Group(int world_size, at::ScalarType stored,
        const GradientBufferOptions& options) {
    for (int rank = 0; rank < world_size; ++rank) {
      flats_.push_back(
          FlatOf({at::zeros({2, 5}, stored), at::zeros({3}, stored)},
                 world_size, rank));
      buffers_.emplace_back(flats_.back().get(), options);
      shards_.emplace_back(flats_.back().get(), options);
      memory_.push_back(at::full({buffers_.back().bytes()}, 255, at::kByte));
    }
  }

  GradientBuffer& buffer(int rank) { return buffers_[rank]; }
  ShardGradient& shard(int rank) { return shards_[rank]; }
  ReduceBuffer Of(int rank, const at::Tensor& memory) const {
    return {buffers_[rank].CurrentLayout(), memory};
  }
  ReduceBuffer memory(int rank) const { return Of(rank, memory_[rank]); }
  const FlatParameter& flat(int rank) const { return *flats_[rank]; }
  at::Tensor Whole(int rank) const {
    return buffers_[rank].Whole(memory(rank));
  }

  void Fill(int rank, const Tensors& gradients) {
    ReduceBuffer buffer = memory(rank);
    buffers_[rank].Fill(buffer, gradients);
  }
  void Add(int rank, const Tensors& gradients) {
    ReduceBuffer buffer = memory(rank);
    buffers_[rank].Add(buffer, gradients);
  }

  // Returns the mean of parameter a, put together from all ranks: summed rank
  // by rank in the buffer's dtype.
  at::Tensor Mean() {
    at::Tensor sum = Whole(0).clone();
    for (size_t rank = 1; rank < buffers_.size(); ++rank) {
      sum += Whole(static_cast<int>(rank));
    }
    Tensors parts;
    for (size_t rank = 0; rank < buffers_.size(); ++rank) {
      EXPECT_OK(shards_[rank].AccumulateMean(
          Of(static_cast<int>(rank), sum.view(at::kByte))));
      const at::Tensor& gradient = flats_[rank]->ShardSlice(0).grad();
      parts.push_back(gradient);
    }
    return at::cat(parts);
  }

 private:
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::vector<GradientBuffer> buffers_;
  std::vector<ShardGradient> shards_;
  Tensors memory_;
};

GradientBufferOptions Reduced(at::ScalarType reduce, at::ScalarType gradient,
                              GradientScaling scaling) {
  return {reduce, gradient, scaling};
}

Tensors Filled(double value, at::ScalarType dtype) {
  return {at::full({2, 5}, value, dtype), at::full({3}, value, dtype)};
}

struct DtypesCase {
  at::ScalarType stored;
  at::ScalarType computed;  // the dtype that autograd's gradients have
  at::ScalarType reduce;
  at::ScalarType gradient;
};

class ReduceDtypeTest : public ::testing::TestWithParam<DtypesCase> {};

// Small integers are exact in every dtype.
TEST_P(ReduceDtypeTest, MeanArrivesInTheDtypeOfTheGradient) {
  const DtypesCase& c = GetParam();
  for (const int world_size : {1, 2, 4, 5}) {
    SCOPED_TRACE(world_size);
    Group group(world_size, c.stored,
                Reduced(c.reduce, c.gradient, MeanOver(world_size, c.reduce)));
    for (int rank = 0; rank < world_size; ++rank) {
      group.Fill(rank, Filled(4 * world_size, c.computed));
      group.Add(rank, Filled(8 * rank, c.computed));
      EXPECT_EQ(group.Whole(rank).scalar_type(), c.reduce);
    }
    const at::Tensor mean = group.Mean();
    EXPECT_EQ(mean.scalar_type(), c.gradient);
    EXPECT_TRUE(mean.allclose(at::full({10}, 8.0 * world_size - 4, c.gradient),
                              1e-2, 0));
  }
}

TEST_P(ReduceDtypeTest, AddGivesWhatFillOfTheSumWould) {
  const DtypesCase& c = GetParam();
  const GradientBufferOptions options =
      Reduced(c.reduce, c.gradient, {0.5, 0.25});
  Group added(3, c.stored, options);
  Group filled(3, c.stored, options);
  const at::Tensor column = at::arange(2, c.computed).view({2, 1});
  const at::Tensor expanded = column.expand({2, 5});
  const at::Tensor strided = at::ones({5, 2}, c.computed).t();
  const at::Tensor sparse = at::eye(5, c.computed).slice(0, 0, 2).to_sparse(1);
  added.Fill(1, {at::Tensor(), at::ones({3}, c.computed)});
  added.Add(1, {expanded, at::Tensor()});
  added.Add(1, {strided, at::Tensor()});
  added.Add(1, {sparse, at::ones({3}, c.computed)});
  filled.Fill(1, {expanded + strided + sparse.to_dense(),
                  at::full({3}, 2, c.computed)});
  EXPECT_TRUE(added.Whole(1).equal(filled.Whole(1)));
}

INSTANTIATE_TEST_SUITE_P(
    All, ReduceDtypeTest,
    ::testing::Values(
        DtypesCase{at::kFloat, at::kFloat, at::kFloat, at::kFloat},
        DtypesCase{at::kFloat, at::kBFloat16, at::kFloat, at::kFloat},
        DtypesCase{at::kFloat, at::kBFloat16, at::kBFloat16, at::kFloat},
        DtypesCase{at::kFloat, at::kBFloat16, at::kBFloat16, at::kBFloat16},
        DtypesCase{at::kFloat, at::kHalf, at::kHalf, at::kFloat},
        DtypesCase{at::kFloat, at::kHalf, at::kFloat, at::kFloat},
        DtypesCase{at::kFloat, at::kFloat, at::kBFloat16, at::kFloat},
        DtypesCase{at::kBFloat16, at::kBFloat16, at::kFloat, at::kBFloat16},
        DtypesCase{at::kDouble, at::kFloat, at::kDouble, at::kDouble}),
    [](const auto& info) {
      return absl::StrCat(c10::toString(info.param.stored), "In",
                          c10::toString(info.param.computed), "Over",
                          c10::toString(info.param.reduce), "Into",
                          c10::toString(info.param.gradient));
    });

// In bf16, 256 + 1 is 256.
TEST(AccumulationDtypeTest, Fp32KeepsWhatASumInBf16WouldLose) {
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    Group group(1, at::kFloat, Reduced(reduce, at::kFloat, {}));
    group.Fill(0, Filled(256, at::kBFloat16));
    group.Add(0, Filled(1, at::kBFloat16));
    EXPECT_EQ(group.Mean()[0].item<float>(), reduce == at::kFloat ? 257 : 256);
  }
}

TEST(AccumulationDtypeTest, ScalingInTwoPartsKeepsASumInFp16Finite) {
  constexpr int kRanks = 4;
  const auto mean = [](GradientScaling scaling) {
    Group group(kRanks, at::kFloat, Reduced(at::kHalf, at::kFloat, scaling));
    for (int rank = 0; rank < kRanks; ++rank) {
      group.Fill(rank, Filled(30000, at::kHalf));
    }
    return group.Mean()[0].item<float>();
  };
  EXPECT_EQ(mean(MeanOver(kRanks, at::kHalf)), 30000);
  EXPECT_TRUE(std::isinf(mean({1, 1.0 / kRanks})));
}

// The third is rounded once to the gradient's dtype, not to the buffer's.
TEST(AccumulationDtypeTest, TheSecondFactorIsAppliedInTheWiderDtype) {
  Group group(3, at::kFloat,
              Reduced(at::kBFloat16, at::kFloat, MeanOver(3, at::kBFloat16)));
  for (int rank = 0; rank < 3; ++rank) {
    group.Fill(rank, Filled(rank == 0 ? 1 : 0, at::kBFloat16));
  }
  EXPECT_EQ(group.Mean()[0].item<float>(), 1.0f / 3);
}

TEST(AccumulationDtypeTest, LaterScalingsHoldForLaterGradients) {
  Group group(2, at::kFloat, Reduced(at::kFloat, at::kFloat, {1, 0.5}));
  for (int rank = 0; rank < 2; ++rank) {
    group.buffer(rank).SetScaling({2, 4});
    group.shard(rank).SetScaling({2, 4});
    group.Fill(rank, Filled(1, at::kFloat));
  }
  EXPECT_EQ(group.Mean()[0].item<float>(), 1 * 2 * 2 * 4);
}

TEST(AccumulationDtypeTest, AFlagOfAnEarlierGradientStays) {
  Group group(1, at::kFloat, Reduced(at::kFloat, at::kFloat, {}));
  group.Fill(0, {at::ones({2, 5}), at::Tensor()});
  group.Add(0, {at::Tensor(), at::Tensor()});
  EXPECT_OK(group.shard(0).AccumulateMean(group.memory(0)));
  EXPECT_TRUE(group.flat(0).ShardSlice(0).grad().defined());
  EXPECT_FALSE(group.flat(0).ShardSlice(1).grad().defined());
}

TEST(DropUnusedGradientTest, GivesMemoryBackOnceNoSliceUsesIt) {
  Group group(1, at::kFloat, Reduced(at::kFloat, at::kFloat, {}));
  group.Fill(0, Filled(1, at::kFloat));
  EXPECT_OK(group.shard(0).AccumulateMean(group.memory(0)));
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      group.flat(0).ShardSlice(0).grad().storage().getWeakStorageImpl());
  group.shard(0).DropUnused();
  EXPECT_FALSE(storage.expired()) << "a gradient in use is gone";
  group.flat(0).ShardSlice(0).mutable_grad().reset();
  group.shard(0).DropUnused();
  EXPECT_FALSE(storage.expired()) << "the other gradient is gone";
  EXPECT_EQ(group.flat(0).ShardSlice(1).grad()[0].item<float>(), 1);
  group.flat(0).ShardSlice(1).mutable_grad().reset();
  EXPECT_FALSE(storage.expired());
  group.shard(0).DropUnused();
  EXPECT_TRUE(storage.expired());
  EXPECT_OK(group.shard(0).AccumulateMean(group.memory(0)));
  EXPECT_EQ(group.flat(0).ShardSlice(1).grad()[0].item<float>(), 1);
}

}  // namespace
}  // namespace fsdp::testing
