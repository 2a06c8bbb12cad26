#include "device_ops/testing/operator_cases.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>

#include "device_ops/fused_layers.h"

namespace fsdp::device_ops::testing {

at::Tensor RandomNumbers(at::ScalarType dtype, int64_t size, int seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  at::Tensor numbers =
      at::empty({size}, at::TensorOptions().dtype(at::kDouble));
  double* const data = numbers.mutable_data_ptr<double>();
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t kind = random() % 16;
    const double magnitude = kind == 0 ? 1e-41 : kind == 1 ? 1e-6 : 1;
    data[i] = kind == 2   ? (i % 2 == 0 ? 0.0 : -0.0)
              : kind == 3 ? 60'000 * std::tanh(normal(random))
                          : magnitude * normal(random);
  }
  return numbers.to(dtype);
}

std::string Difference(const at::Tensor& actual, const at::Tensor& expected) {
  std::ostringstream text;
  if (actual.scalar_type() != expected.scalar_type() ||
      actual.sizes() != expected.sizes()) {
    text << actual.toString() << " " << actual.sizes() << " and "
         << expected.toString() << " " << expected.sizes();
    return text.str();
  }
  const int64_t size = actual.element_size();
  const at::ScalarType integer = size == 1   ? at::kChar
                                 : size == 2 ? at::kShort
                                 : size == 4 ? at::kInt
                                             : at::kLong;
  const at::Tensor a = actual.contiguous().view({-1});
  const at::Tensor b = expected.contiguous().view({-1});
  if (a.view(integer).equal(b.view(integer))) return "";
  const at::Tensor differ = a.view(integer)
                                .ne(b.view(integer))
                                .logical_and(a.eq(a).logical_or(b.eq(b)))
                                .nonzero();
  if (differ.numel() == 0) return "";
  const auto i = differ[0].item<int64_t>();
  text.precision(17);
  text << "element " << i << " of " << a.numel() << " is "
       << a[i].item<double>() << " and should be " << b[i].item<double>();
  return text.str();
}

PackCase MakePackCase(int64_t size, int pieces) {
  PackCase result;
  std::vector<int64_t> used;  // of each source
  for (at::ScalarType dtype : kDtypes) {
    result.sources.push_back(
        RandomNumbers(dtype, size, static_cast<int>(used.size())));
    used.push_back(0);
  }
  int64_t end = 0;
  for (int i = 0; i < pieces; ++i) {
    const int64_t source = (i * 7 + i / 4) % 4;
    const int64_t left = size - used[source];
    const int64_t numel = std::min(left, 1 + size * (1 + i % 3) / (pieces + 1));
    if (i % 3 == 0) {
      result.packing.AddZeros(end, end + i % 5);
      end += i % 5;
    } else if (i % 3 == 1) {
      result.packing.AddOnes(end, end + 3);
      end += 3;
    }
    result.packing.AddPiece(source, used[source], end, numel);
    used[source] += numel;
    end += numel;
  }
  result.out_size = end;
  return result;
}

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
    if (layout < 2 && tokens > 0) {
      EXPECT_EQ(y.strides(), x.strides());
    }
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
