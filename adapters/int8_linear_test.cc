// Held against at::linear() of the same numbers.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "adapters/int8_rows.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "fsdp/testing/memory_meter.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::testing::MemoryMeter;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kIn = 37, kOut = 11;
constexpr Int8Rows kLayout{kIn, 16};

class AutocastToBFloat16 {
 public:
  AutocastToBFloat16() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~AutocastToBFloat16() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

struct Case {
  std::vector<int64_t> batch;
  c10::ScalarType dtype;
  bool has_bias;
};

struct Computed {
  at::Tensor y;
  at::Tensor x_grad;
  at::Tensor bias_grad;
};

// By `linear` of x and bias.
template <typename Linear>
Computed Compute(const Case& c, const Linear& linear) {
  at::manual_seed(4);
  std::vector<int64_t> sizes = c.batch;
  sizes.push_back(kIn);
  const at::Tensor x = at::randn(sizes, c.dtype).requires_grad_();
  at::Tensor bias;
  if (c.has_bias) bias = at::randn({kOut}, c.dtype).requires_grad_();
  const at::Tensor y = linear(x, bias);
  y.backward(at::randn(y.sizes(), c.dtype));
  return {y.detach(), x.grad(), c.has_bias ? bias.grad() : at::Tensor()};
}

TEST(Int8LinearTest, ComputesWhatLinearDoesWithTheSameNumbers) {
  at::manual_seed(1);
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  for (const auto& batch :
       std::vector<std::vector<int64_t>>{{}, {1}, {5}, {2, 3}, {2, 1, 4}}) {
    for (const c10::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const bool has_bias : {false, true}) {
        const Case c{batch, dtype, has_bias};
        const at::Tensor numbers = Unpack(kLayout, packed, dtype);
        const Computed expected =
            Compute(c, [&](const at::Tensor& x, const at::Tensor& bias) {
              return at::linear(x, numbers, bias);
            });
        const Computed actual =
            Compute(c, [&](const at::Tensor& x, const at::Tensor& bias) {
              return Int8Linear(kLayout, x, packed, bias);
            });
        EXPECT_TRUE(at::equal(actual.y, expected.y));
        EXPECT_EQ(actual.x_grad.scalar_type(), dtype);
        EXPECT_TRUE(at::allclose(actual.x_grad, expected.x_grad, 1e-6, 1e-6));
        if (!has_bias) continue;
        EXPECT_TRUE(
            at::allclose(actual.bias_grad, expected.bias_grad, 1e-2, 1e-6));
      }
    }
  }
}

TEST(Int8LinearTest, AutocastChoosesTheDtype) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  const at::Tensor x = at::randn({3, kIn}).requires_grad_();
  at::Tensor y;
  {
    const AutocastToBFloat16 autocast;
    y = Int8Linear(kLayout, x, packed, {});
  }
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(x.grad(), Unpack(kLayout, packed, at::kFloat).sum(0),
                           1e-2, 5e-2));
}

// Neither numbers nor inputs are kept from forward to backward.
TEST(Int8LinearTest, HoldsOneMatrixWhileItComputes) {
  constexpr int64_t kWide = 512;
  const Int8Rows layout{kWide, 64};
  const at::Tensor packed = Pack(layout, at::randn({kWide, kWide}));
  const at::Tensor x = at::randn({1, kWide}).requires_grad_();
  constexpr int64_t kMatrix = kWide * kWide * 4;
  constexpr int64_t kVectors = 16 * kWide * 4;
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  at::Tensor y = Int8Linear(layout, x, packed, {});
  EXPECT_GE(meter->peak(), kMatrix);
  EXPECT_LE(meter->TakePeak(), kMatrix + kVectors);
  EXPECT_LE(meter->live(), kVectors);
  y.sum().backward();
  EXPECT_LE(meter->peak(), kMatrix + kVectors);
}

TEST(Int8LinearTest, AGradientOfTheGradientIsThere) {
  at::manual_seed(2);
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  const at::Tensor numbers = Unpack(kLayout, packed, at::kDouble);
  std::vector<at::Tensor> results;
  for (const bool is_int8 : {false, true}) {
    at::manual_seed(5);
    const at::Tensor x = at::randn({3, kIn}, at::kDouble).requires_grad_();
    const at::Tensor y =
        is_int8 ? Int8Linear(kLayout, x, packed, {}) : at::linear(x, numbers);
    y.square().sum().backward({}, /*retain_graph=*/true,
                              /*create_graph=*/true);
    const at::Tensor first = x.grad();
    x.mutable_grad().reset();
    first.square().sum().backward();
    results.push_back(x.grad());
  }
  EXPECT_TRUE(at::allclose(results[1], results[0], 1e-10, 1e-10));
}

TEST(Int8LinearTest, NothingIsRecordedForAFrozenInput) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  EXPECT_FALSE(
      Int8Linear(kLayout, at::randn({2, kIn}), packed, {}).requires_grad());
  const c10::NoGradGuard no_grad;
  EXPECT_FALSE(
      Int8Linear(kLayout, at::randn({2, kIn}).requires_grad_(), packed, {})
          .requires_grad());
}

TEST(Int8LinearTest, AWeightThatWasConvertedIsRefused) {
  const at::Tensor packed = Pack(kLayout, at::randn({kOut, kIn}));
  for (const at::Tensor& weight :
       {packed.to(at::kFloat), packed.slice(1, 0, kIn), packed.flatten()}) {
    EXPECT_THAT(
        TorchToStatus("forward",
                      [&] {
                        Int8Linear(kLayout, at::randn({2, kIn}), weight, {});
                      }),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 HasSubstr("before QuantizeBase()")));
  }
}

}  // namespace
}  // namespace fsdp::adapters
