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

}  // namespace
}  // namespace fsdp::adapters
