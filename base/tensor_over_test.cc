#include "base/tensor_over.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "gtest/gtest.h"

namespace fsdp {
namespace {

TEST(TensorOverTest, LooksIntoTheStorage) {
  const at::Tensor base = at::arange(12, at::kFloat);
  const at::Tensor over =
      TensorOver(base.storage(), 1, {2, 3}, {1, 4}, at::kFloat);
  EXPECT_TRUE(over.equal(base.as_strided({2, 3}, {1, 4}, 1)));
  over.fill_(-1);
  EXPECT_EQ(base[1].item<float>(), -1);
}

TEST(RangeOfTest, IsWhatNarrowGives) {
  const at::Tensor base = at::arange(10, at::kFloat);
  for (int64_t begin : {0, 3, 10}) {
    const at::Tensor range = RangeOf(base, begin, 10 - begin);
    EXPECT_TRUE(range.equal(base.narrow(0, begin, 10 - begin)));
    EXPECT_EQ(range.storage_offset(), begin);
    EXPECT_TRUE(range.is_alias_of(base));
  }
}

TEST(RangeOfTest, SeesAnotherDtypeBehindAnOffset) {
  const at::Tensor bytes = at::zeros({64}, at::kByte);
  const at::Tensor part = bytes.narrow(0, 16, 48);
  RangeOf(part, at::kFloat, 2, 3).fill_(1);
  EXPECT_TRUE(
      bytes.view(at::kFloat).narrow(0, 6, 3).equal(at::ones({3}, at::kFloat)));
  EXPECT_EQ(bytes.view(at::kFloat).sum().item<float>(), 3);
  const at::Tensor whole = RangeOf(part, at::kDouble, 0, 6);
  EXPECT_EQ(whole.const_data_ptr(), part.const_data_ptr());
  EXPECT_EQ(RangeOf(whole, at::kByte, 0, 48).numel(), 48);
}

TEST(RangeOfTest, IsUnknownToAutograd) {
  const at::Tensor leaf = at::zeros({4}).requires_grad_();
  const int64_t version = leaf._version();
  const at::Tensor range = RangeOf(leaf.detach(), 1, 2);
  EXPECT_FALSE(range.requires_grad());
  EXPECT_FALSE(range.is_view());
  range.fill_(2);
  EXPECT_EQ(leaf.sum().item<float>(), 4);
  EXPECT_EQ(leaf._version(), version);
}

TEST(RangeOfDeathTest, RefusesWhatDoesNotFit) {
  const at::Tensor base = at::zeros({4});
  EXPECT_DEATH(RangeOf(base, 1, 4), "nbytes");
  EXPECT_DEATH(RangeOf(base, -1, 2), "begin");
  EXPECT_DEATH(RangeOf(base.narrow(0, 1, 3), at::kDouble, 0, 1), "offset");
}

}  // namespace
}  // namespace fsdp
