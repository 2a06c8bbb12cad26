// Gradient buffers whose dtype differs from the parameters', and sums in them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/testing/runtime_unit.h"

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
      gradients_.emplace_back(flats_.back().get(), options);
      memory_.push_back(at::full({gradients_.back().bytes()}, 255, at::kByte));
    }
  }

  FlatGradients& gradients(int rank) { return gradients_[rank]; }
  ReduceBuffer Of(int rank, const at::Tensor& memory) const {
    return {gradients_[rank].CurrentLayout(), memory};
  }
  ReduceBuffer memory(int rank) const { return Of(rank, memory_[rank]); }
  const FlatParameter& flat(int rank) const { return *flats_[rank]; }
  at::Tensor Whole(int rank) const {
    return gradients_[rank].Whole(memory(rank));
  }

  void Fill(int rank, const Tensors& gradients) {
    ReduceBuffer buffer = memory(rank);
    gradients_[rank].Fill(buffer, gradients);
  }
  void Add(int rank, const Tensors& gradients) {
    ReduceBuffer buffer = memory(rank);
    gradients_[rank].Add(buffer, gradients);
  }

  // Returns the mean of parameter a, put together from all ranks: summed rank
  // by rank in the buffer's dtype.
  at::Tensor Mean() {
    at::Tensor sum = Whole(0).clone();
    for (size_t rank = 1; rank < gradients_.size(); ++rank) {
      sum += Whole(static_cast<int>(rank));
    }
    Tensors parts;
    for (size_t rank = 0; rank < gradients_.size(); ++rank) {
      EXPECT_OK(gradients_[rank].AccumulateMean(
          Of(static_cast<int>(rank), sum.view(at::kByte))));
      const at::Tensor& gradient = flats_[rank]->ShardSlice(0).grad();
      parts.push_back(gradient);
    }
    return at::cat(parts);
  }

 private:
  std::vector<std::unique_ptr<FlatParameter>> flats_;
  std::vector<FlatGradients> gradients_;
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
  added.Add(1, {sparse, at::ones({3}, c.computed)});
  added.Add(1, {strided, at::Tensor()});
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

// The third is rounded once to the gradient's dtype, not to the buffer's.
TEST(AccumulationDtypeTest, TheSecondFactorIsAppliedInTheWiderDtype) {
  Group group(3, at::kFloat,
              Reduced(at::kBFloat16, at::kFloat, MeanOver(3, at::kBFloat16)));
  for (int rank = 0; rank < 3; ++rank) {
    group.Fill(rank, Filled(rank == 0 ? 1 : 0, at::kBFloat16));
  }
  EXPECT_EQ(group.Mean()[0].item<float>(), 1.0f / 3);
}

TEST(DropUnusedGradientTest, GivesMemoryBackOnceNoSliceUsesIt) {
  Group group(1, at::kFloat, Reduced(at::kFloat, at::kFloat, {}));
  group.Fill(0, Filled(1, at::kFloat));
  EXPECT_OK(group.gradients(0).AccumulateMean(group.memory(0)));
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage(
      group.flat(0).ShardSlice(0).grad().storage().getWeakStorageImpl());
  group.gradients(0).DropUnused();
  EXPECT_FALSE(storage.expired()) << "a gradient in use is gone";
  group.flat(0).ShardSlice(0).mutable_grad().reset();
  group.gradients(0).DropUnused();
  EXPECT_FALSE(storage.expired()) << "the other gradient is gone";
  EXPECT_EQ(group.flat(0).ShardSlice(1).grad()[0].item<float>(), 1);
  group.flat(0).ShardSlice(1).mutable_grad().reset();
  EXPECT_FALSE(storage.expired());
  group.gradients(0).DropUnused();
  EXPECT_TRUE(storage.expired());
  EXPECT_OK(group.gradients(0).AccumulateMean(group.memory(0)));
  EXPECT_EQ(group.flat(0).ShardSlice(1).grad()[0].item<float>(), 1);
}

// Tests one rank with these parameters, which are zeros.
class TakeTest : public ::testing::Test {
 protected:
  TakeTest() { Shard({at::zeros({3, 4}), at::zeros({4, 6}).t()}); }

  void Shard(const Tensors& tensors, GradientScaling scaling = {},
             at::ScalarType reduce = at::kFloat) {
    flat_ = FlatOf(tensors);
    const GradientBufferOptions options = {reduce, at::kFloat, scaling};
    gradients_ = std::make_unique<FlatGradients>(flat_.get(), options);
  }

  at::Tensor& Grad(int i) { return flat_->ShardSlice(i).mutable_grad(); }

  // Takes `gradient` for the first parameter in place of its present one and
  // checks the values. Returns whether the slice has its memory.
  bool IsTakenAsItIs(at::Tensor gradient) {
    Grad(0).reset();
    const at::Tensor values = gradient.to_dense().contiguous().clone();
    const void* const data =
        gradient.is_sparse() ? nullptr : gradient.data_ptr();
    Tensors gradients(2);
    gradients[0] = std::move(gradient);
    EXPECT_TRUE(gradients_->Take(gradients));
    EXPECT_TRUE(Grad(0).equal(values.flatten()));
    EXPECT_FALSE(Grad(0).requires_grad());
    return Grad(0).data_ptr() == data;
  }

  std::unique_ptr<FlatParameter> flat_;
  std::unique_ptr<FlatGradients> gradients_;
};

at::Tensor Ramp() { return at::arange(12, at::kFloat).view({3, 4}).clone(); }

TEST_F(TakeTest, WhatNobodyElseHoldsIsNotCopied) {
  EXPECT_TRUE(IsTakenAsItIs(Ramp()));
  // Views that autograd knows hold their bases.
  at::Tensor view = Ramp();
  view = view.t();
  view = view.t();
  EXPECT_TRUE(view.is_view());
  EXPECT_TRUE(IsTakenAsItIs(std::move(view)));
  at::Tensor detached = Ramp();
  detached = detached.detach();
  EXPECT_TRUE(IsTakenAsItIs(std::move(detached)));
}

TEST_F(TakeTest, WhatOthersHoldIsCopied) {
  const at::Tensor kept = Ramp();
  const at::Tensor before = kept.clone();
  for (const at::Tensor& view :
       {kept, kept.detach(), kept.view({4, 3}).view({3, 4}), kept.t().t()}) {
    EXPECT_FALSE(IsTakenAsItIs(view));
    Grad(0).fill_(100);
    EXPECT_TRUE(kept.equal(before));
  }
  at::Tensor base = at::arange(12, at::kFloat);
  const at::Tensor sibling = base.narrow(0, 0, 1);
  at::Tensor view = base.view({3, 4});
  base.reset();
  EXPECT_FALSE(IsTakenAsItIs(std::move(view)));
}

TEST_F(TakeTest, WhatIsNoGradientByItselfIsCopied) {
  // These are separate statements, because an expression keeps its temporaries.
  at::Tensor gradient = at::ones({});
  gradient = gradient.expand({3, 4});
  EXPECT_FALSE(IsTakenAsItIs(std::move(gradient)));
  gradient = at::arange(12, at::kFloat);
  gradient = gradient.view({4, 3});
  gradient = gradient.t();
  EXPECT_FALSE(IsTakenAsItIs(std::move(gradient)));
  for (const int64_t begin : {0, 3}) {
    gradient = at::arange(24, at::kFloat);
    gradient = gradient.view({6, 4});
    gradient = gradient.slice(0, begin, begin + 3);
    EXPECT_FALSE(IsTakenAsItIs(std::move(gradient)));
  }
  EXPECT_FALSE(IsTakenAsItIs(Ramp().to_sparse(1)));
  EXPECT_EQ(Grad(0).storage().nbytes(), 12 * sizeof(float));
}

TEST_F(TakeTest, OneTensorForTwoParametersBecomesTwo) {
  Shard({at::zeros({3, 4}), at::zeros({3, 4})});
  Tensors gradients(2, Ramp());
  ASSERT_TRUE(gradients_->Take(gradients));
  gradients.clear();
  EXPECT_FALSE(Grad(0).is_alias_of(Grad(1)));
  Grad(0).mul_(2);
  EXPECT_TRUE(Grad(1).equal(Ramp().flatten()));
  EXPECT_TRUE(Grad(0).equal(2 * Ramp().flatten()));
}

TEST_F(TakeTest, StorageOrderIsThatOfTheParameter) {
  Tensors gradients(2);
  gradients[1] = at::arange(24, at::kFloat).view({4, 6}).t();
  const void* const data = gradients[1].data_ptr();
  ASSERT_TRUE(gradients_->Take(gradients));
  EXPECT_FALSE(Grad(0).defined());
  EXPECT_EQ(Grad(1).data_ptr(), data);
  EXPECT_TRUE(Grad(1).equal(at::arange(24, at::kFloat)));
  Grad(1).reset();
  gradients[1] = at::arange(24, at::kFloat).view({6, 4});
  ASSERT_TRUE(gradients_->Take(gradients));
  EXPECT_TRUE(Grad(1).equal(
      at::arange(24, at::kFloat).view({6, 4}).t().contiguous().flatten()));
}

TEST_F(TakeTest, IsAddedInPlaceToWhatIsThere) {
  Tensors gradients(2);
  gradients[0] = Ramp();
  ASSERT_TRUE(gradients_->Take(gradients));
  Grad(1) = at::full({24}, 100.f);
  const Tensors before = {Grad(0), Grad(1)};
  gradients = {Ramp(), at::ones({6, 4})};
  ASSERT_TRUE(gradients_->Take(gradients));
  EXPECT_TRUE(Grad(0).is_same(before[0]));
  EXPECT_TRUE(Grad(1).is_same(before[1]));
  EXPECT_TRUE(Grad(0).equal(2 * Ramp().flatten()));
  EXPECT_TRUE(Grad(1).equal(at::full({24}, 101.f)));
  EXPECT_TRUE(gradients[0].equal(Ramp()));
}

TEST_F(TakeTest, WhatIsFrozenIsLeftAlone) {
  flat_->ShardSlice(0).set_requires_grad(false);
  const Tensors gradients = {Ramp(), at::ones({6, 4})};
  ASSERT_TRUE(gradients_->Take(gradients));
  EXPECT_FALSE(Grad(0).defined());
  EXPECT_TRUE(Grad(1).defined());
}

TEST_F(TakeTest, WhatAReductionWouldChangeIsNotTaken) {
  const auto refuses = [this](const Tensors& gradients) {
    EXPECT_FALSE(gradients_->Take(gradients));
    EXPECT_FALSE(Grad(0).defined());
  };
  refuses({Ramp().to(at::kBFloat16), at::Tensor()});
  Shard({at::zeros({3, 4})}, {0.5, 1});
  refuses({Ramp()});
  Shard({at::zeros({3, 4})}, {1, 0.5});
  refuses({Ramp()});
  Shard({at::zeros({3, 4})}, {}, at::kBFloat16);
  refuses({Ramp()});
}

}  // namespace
}  // namespace fsdp::testing
