// The third-party libraries compile, link and run together.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

absl::Status ExpectAll(const at::Tensor& tensor, float value) {
  if (!tensor.eq(value).all().item<bool>()) {
    return absl::InternalError("an element differs");
  }
  return absl::OkStatus();
}

TEST(SmokeTest, AddsTwoTensors) {
  const at::Tensor sum = at::full({2, 3}, 1.0F).add(at::full({2, 3}, 2.0F));
  EXPECT_TRUE(ExpectAll(sum, 3.0F).ok());
  EXPECT_FALSE(ExpectAll(sum, 4.0F).ok());
}

}  // namespace
}  // namespace fsdp
