#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cmath>

#include "examples/llama/model/attention.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

TEST(RmsNormTest, DividesByTheRootOfTheMeanSquare) {
  const c10::NoGradGuard no_grad;
  RmsNorm norm(4, /*eps=*/0.25);
  EXPECT_TRUE(norm->forward(at::full({2, 4}, 3.0))
                  .allclose(at::full({2, 4}, 3 / std::sqrt(9.25))));
  norm->weight.fill_(-2);
  EXPECT_TRUE(norm->forward(at::full({2, 4}, 3.0))
                  .allclose(at::full({2, 4}, -6 / std::sqrt(9.25))));
}

TEST(RmsNormTest, RoundsBeforeItMultipliesByTheWeight) {
  const c10::NoGradGuard no_grad;
  at::manual_seed(0);
  RmsNorm norm(64, /*eps=*/1e-6);
  norm->to(at::kBFloat16);
  norm->weight.copy_(at::randn({64}));
  const at::Tensor x = at::randn({8, 64}).to(at::kBFloat16);
  const at::Tensor exact = x.to(at::kDouble);
  const at::Tensor normalized =
      exact / (exact.square().mean(-1, /*keepdim=*/true) + 1e-6).sqrt();
  const at::Tensor y = norm->forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(y.equal(normalized.to(at::kBFloat16) * norm->weight));
  EXPECT_FALSE(
      y.equal((normalized * norm->weight.to(at::kDouble)).to(at::kBFloat16)));
}

// As where a sharded model keeps norms in full precision.
TEST(RmsNormTest, AnExacterWeightGivesAnExacterResult) {
  const c10::NoGradGuard no_grad;
  RmsNorm norm(2, /*eps=*/1e-6);
  EXPECT_EQ(norm->forward(at::full({1, 2}, 1.0, at::kBFloat16)).scalar_type(),
            at::kFloat);
}

}  // namespace
}  // namespace llama
