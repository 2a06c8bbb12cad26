// Gradients that become the slices' gradients without a buffer, on one rank.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/shard_gradient.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatParameter;

using Tensors = std::vector<at::Tensor>;

// Tests one rank with these parameters, which are zeros.
class TakeTest : public ::testing::Test {
 protected:
  TakeTest() { Shard({at::zeros({3, 4}), at::zeros({4, 6}).t()}); }

  void Shard(const Tensors& tensors, GradientScaling scaling = {},
             at::ScalarType reduce = at::kFloat) {
    flat_ = FlatOf(tensors);
    const GradientBufferOptions options = {reduce, at::kFloat, scaling};
    buffer_ = std::make_unique<GradientBuffer>(flat_.get(), options);
    shard_ = std::make_unique<ShardGradient>(flat_.get(), options);
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
    EXPECT_TRUE(shard_->Take(gradients));
    EXPECT_TRUE(Grad(0).equal(values.flatten()));
    EXPECT_FALSE(Grad(0).requires_grad());
    return Grad(0).data_ptr() == data;
  }

  std::unique_ptr<FlatParameter> flat_;
  std::unique_ptr<GradientBuffer> buffer_;
  std::unique_ptr<ShardGradient> shard_;
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
  ASSERT_TRUE(shard_->Take(gradients));
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
  ASSERT_TRUE(shard_->Take(gradients));
  EXPECT_FALSE(Grad(0).defined());
  EXPECT_EQ(Grad(1).data_ptr(), data);
  EXPECT_TRUE(Grad(1).equal(at::arange(24, at::kFloat)));
  Grad(1).reset();
  gradients[1] = at::arange(24, at::kFloat).view({6, 4});
  ASSERT_TRUE(shard_->Take(gradients));
  EXPECT_TRUE(Grad(1).equal(
      at::arange(24, at::kFloat).view({6, 4}).t().contiguous().flatten()));
}

TEST_F(TakeTest, IsAddedInPlaceToWhatIsThere) {
  Tensors gradients(2);
  gradients[0] = Ramp();
  ASSERT_TRUE(shard_->Take(gradients));
  Grad(1) = at::full({24}, 100.f);
  const Tensors before = {Grad(0), Grad(1)};
  gradients = {Ramp(), at::ones({6, 4})};
  ASSERT_TRUE(shard_->Take(gradients));
  EXPECT_TRUE(Grad(0).is_same(before[0]));
  EXPECT_TRUE(Grad(1).is_same(before[1]));
  EXPECT_TRUE(Grad(0).equal(2 * Ramp().flatten()));
  EXPECT_TRUE(Grad(1).equal(at::full({24}, 101.f)));
  EXPECT_TRUE(gradients[0].equal(Ramp()));
}

TEST_F(TakeTest, WhatIsFrozenIsLeftAlone) {
  flat_->ShardSlice(0).set_requires_grad(false);
  const Tensors gradients = {Ramp(), at::ones({6, 4})};
  ASSERT_TRUE(shard_->Take(gradients));
  EXPECT_FALSE(Grad(0).defined());
  EXPECT_TRUE(Grad(1).defined());
}

// Covers sums on what was taken, and on what came through a buffer since.
TEST_F(TakeTest, LaterSumsAreAddedToWhatWasTakenWithoutMemoryOfTheirOwn) {
  Tensors gradients = {Ramp(), at::ones({6, 4})};
  ASSERT_TRUE(shard_->Take(gradients));
  gradients.clear();
  const at::Tensor first = Grad(0);
  ReduceBuffer buffer = {buffer_->CurrentLayout(),
                         at::full({buffer_->bytes()}, 255, at::kByte)};
  buffer_->Fill(buffer, Tensors{Ramp(), at::Tensor()});
  ASSERT_TRUE(shard_->AccumulateMean(buffer).ok());
  EXPECT_TRUE(Grad(0).is_same(first));
  EXPECT_TRUE(first.equal(2 * Ramp().flatten()));
  EXPECT_TRUE(Grad(1).equal(at::ones({24})));
}

TEST_F(TakeTest, WhatAReductionWouldChangeIsNotTaken) {
  const auto refuses = [this](const Tensors& gradients) {
    EXPECT_FALSE(shard_->Take(gradients));
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
