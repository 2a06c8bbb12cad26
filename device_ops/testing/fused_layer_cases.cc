#include "device_ops/testing/fused_layer_cases.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>

#include <vector>

#include "device_ops/fused_layers.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {
namespace {

constexpr int64_t kIgnored = -100;

at::Tensor Random(at::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::randn(sizes, at::kDouble).to(dtype);
}

at::Tensor Leaf(const at::Tensor& tensor) {
  return tensor.detach().requires_grad_();
}

void ExpectRounded(const at::Tensor& actual, const at::Tensor& exact) {
  const c10::ScalarType dtype = actual.scalar_type();
  const double rounding = dtype == at::kBFloat16 ? 0x1p-8
                          : dtype == at::kHalf   ? 0x1p-11
                                                 : 0;
  const double computing = dtype == at::kDouble ? 1e-13 : 1e-6;
  ASSERT_EQ(actual.sizes(), exact.sizes());
  const at::Tensor error =
      (actual.detach().cpu().to(at::kDouble) - exact.detach()).abs();
  const at::Tensor allowed =
      exact.detach().abs() * (rounding + computing) + computing;
  EXPECT_TRUE(error.le(allowed).all().item<bool>())
      << dtype << " " << exact.sizes() << " " << error.max().item<double>();
}

// Returns heads [2, 3, tokens, dim] in memory of [2, tokens, 4, 2 * dim].
at::Tensor HeadsIn(const at::Tensor& memory, int layout) {
  const int64_t dim = memory.size(3) / 2;
  const at::Tensor heads = memory.narrow(2, 1, 3).narrow(3, 0, dim);
  switch (layout) {
    case 0:
      return heads.transpose(1, 2).contiguous();
    case 1:
      return heads.contiguous().transpose(1, 2);
    case 2:
      return heads.transpose(1, 2);
    default:  // neighbours are not neighbours in memory
      return memory.narrow(2, 0, 3).slice(3, 1, 2 * dim, 2).transpose(1, 2);
  }
}

void ExpectRotation(c10::Device device, c10::ScalarType dtype, int64_t tokens,
                    int64_t dim) {
  const at::Tensor memory = Random({2, tokens, 4, 2 * dim}, dtype);
  const at::Tensor cos = Random({tokens, dim}, dtype);
  const at::Tensor sin = Random({tokens, dim}, dtype);
  const at::Tensor gradient = Random({2, 3, tokens, dim}, dtype);
  for (int layout = 0; layout < 4; ++layout) {
    SCOPED_TRACE(::testing::Message() << "layout " << layout);
    const at::Tensor x = Leaf(HeadsIn(memory.to(device), layout));
    const at::Tensor exact_x = Leaf(HeadsIn(memory.to(at::kDouble), layout));
    const at::Tensor y = RotateHalves(x, cos.to(device), sin.to(device));
    const at::Tensor exact =
        PlainRotation(exact_x, cos.to(at::kDouble), sin.to(at::kDouble));
    ExpectRounded(y, exact);
    if (layout < 2 && tokens > 0) EXPECT_EQ(y.strides(), x.strides());
    y.backward(gradient.to(device));
    exact.backward(gradient.to(at::kDouble));
    ExpectRounded(x.grad(), exact_x.grad());
  }
}

void ExpectSwiGlu(const at::Tensor& gate, const at::Tensor& up,
                  c10::Device device) {
  const at::Tensor gradient = Random(gate.sizes(), gate.scalar_type());
  const at::Tensor exact_gate = Leaf(gate.cpu().to(at::kDouble));
  const at::Tensor exact_up = Leaf(up.cpu().to(at::kDouble));
  const at::Tensor leaf_gate = Leaf(gate), leaf_up = Leaf(up);
  const at::Tensor y = SwiGlu(leaf_gate, leaf_up);
  const at::Tensor exact = PlainSwiGlu(exact_gate, exact_up);
  ExpectRounded(y, exact);
  y.backward(gradient.to(device));
  exact.backward(gradient.to(at::kDouble));
  ExpectRounded(leaf_gate.grad(), exact_gate.grad());
  ExpectRounded(leaf_up.grad(), exact_up.grad());
}

void ExpectCrossEntropy(c10::Device device, c10::ScalarType dtype, int64_t rows,
                        int64_t classes) {
  const at::Tensor numbers = 4 * Random({rows * classes + 2}, dtype);
  const at::Tensor targets = at::randint(classes, {rows}, at::kLong);
  targets.slice(0, 1, 2).fill_(kIgnored);
  const at::Tensor exact_logits =
      Leaf(numbers.slice(0, 1, -1).view({rows, classes}).to(at::kDouble));
  const at::Tensor exact = at::cross_entropy_loss(
      exact_logits, targets, /*weight=*/{}, at::Reduction::None, kIgnored);
  exact.sum().backward();
  for (const bool gradient : {false, true}) {
    SCOPED_TRACE(::testing::Message() << rows << " x " << classes);
    const at::Tensor memory = numbers.clone().to(device);
    const at::Tensor logits = memory.slice(0, 1, -1).view({rows, classes});
    ExpectRounded(
        CrossEntropyOfRows(logits, targets.to(device), kIgnored, gradient),
        exact);
    if (gradient) ExpectRounded(logits, exact_logits.grad());
    for (const int64_t end : {int64_t{0}, rows * classes + 1}) {
      EXPECT_EQ(memory[end].item<double>(), numbers[end].item<double>());
    }
  }
}

}  // namespace

at::Tensor PlainRotation(const at::Tensor& x, const at::Tensor& cos,
                         const at::Tensor& sin) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

at::Tensor PlainSwiGlu(const at::Tensor& gate, const at::Tensor& up) {
  return at::silu(gate) * up;
}

void ExpectRotationsRoundOnce(c10::Device device, c10::ScalarType dtype) {
  at::manual_seed(1);
  for (const int64_t tokens : {0, 1, 5}) {
    for (const int64_t dim : {2, 14, 16, 64}) {
      ExpectRotation(device, dtype, tokens, dim);
    }
  }
}

void ExpectSwiGlusRoundOnce(c10::Device device, c10::ScalarType dtype) {
  at::manual_seed(2);
  for (const int64_t size : {0, 1, 2, 7, 8, 9, 257, 1021, 4096}) {
    SCOPED_TRACE(size);
    const at::Tensor memory = Random({2, 2 * size + 1}, dtype).to(device);
    const at::Tensor gates = memory.narrow(1, 0, size);
    const at::Tensor ups = memory.narrow(1, size + 1, size);
    ExpectSwiGlu(gates, ups, device);                            // rows apart
    ExpectSwiGlu(gates.contiguous(), ups.contiguous(), device);  // aligned
    ExpectSwiGlu(gates[0], ups[1], device);
  }
}

void ExpectCrossEntropiesRoundOnce(c10::Device device, c10::ScalarType dtype) {
  at::manual_seed(3);
  for (const int64_t rows : {0, 1, 3}) {
    for (const int64_t classes : {1, 2, 7, 8, 257, 1024, 4099}) {
      ExpectCrossEntropy(device, dtype, rows, classes);
    }
  }
}

}  // namespace fsdp::device_ops::testing
