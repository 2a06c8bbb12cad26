#include "adapters/linear.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

// 1 + 2^-8 is 1 in bfloat16, and 1 + 2^-8 + 2^-8 is not.
TEST(LinearTest, AddsTheBiasBeforeItRounds) {
  const c10::NoGradGuard no_grad;
  Linear linear(2, 1);
  linear->to(at::kBFloat16);
  linear->weight.fill_(1);
  linear->weight[0][1].fill_(1.0 / 256);
  linear->bias.fill_(1.0 / 256);
  for (const auto& sizes : {std::vector<int64_t>{2}, {3, 2}, {2, 3, 2}}) {
    const at::Tensor y =
        linear->forward(at::ones(sizes, linear->weight.options()));
    EXPECT_EQ(y.dim(), static_cast<int64_t>(sizes.size()));
    EXPECT_TRUE(y.eq(1 + 1.0 / 128).all().item<bool>()) << y;
  }
}

// In bfloat16 the product would be 2^-8, and 1 + 2^-8, in the middle of two
// values, the even one: 1.
TEST(LinearTest, AProductIsRoundedOnceWhenItIsAdded) {
  const at::Tensor weight = at::ones({1, 1}, at::kBFloat16);
  const at::Tensor factor = at::ones({1, 1});
  AddProduct(weight, factor, factor * (1.0 / 256 + 1.0 / 131072), /*scale=*/1);
  EXPECT_EQ(weight.item<float>(), 1 + 1.0f / 128);
}

}  // namespace
}  // namespace fsdp::adapters
