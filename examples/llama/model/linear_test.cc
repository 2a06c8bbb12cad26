#include "examples/llama/model/linear.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace llama {
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

TEST(LinearTest, DoesWithoutABias) {
  Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
  EXPECT_EQ(linear->parameters().size(), 1u);
  EXPECT_TRUE(linear->forward(at::ones({1, 2}))
                  .allclose(linear->weight.sum(1, /*keepdim=*/true)));
}

}  // namespace
}  // namespace llama
