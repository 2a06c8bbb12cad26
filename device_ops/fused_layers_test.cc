#include "device_ops/fused_layers.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include "base/testing/fake_device.h"
#include "device_ops/testing/operator_cases.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

using ::fsdp::testing::FakeDevice;
using testing::Difference;
using testing::kDtypes;
using testing::PlainRotation;
using testing::PlainSwiGlu;
using Function =
    std::function<at::Tensor(const std::vector<at::Tensor>& arguments)>;

at::Tensor RotationOf(const std::vector<at::Tensor>& arguments) {
  return RotateHalves(arguments[0], arguments[1], arguments[2]);
}
at::Tensor PlainRotationOf(const std::vector<at::Tensor>& arguments) {
  return PlainRotation(arguments[0], arguments[1], arguments[2]);
}
at::Tensor SwiGluOf(const std::vector<at::Tensor>& arguments) {
  return SwiGlu(arguments[0], arguments[1]);
}
at::Tensor PlainSwiGluOf(const std::vector<at::Tensor>& arguments) {
  return PlainSwiGlu(arguments[0], arguments[1]);
}

// Returns heads, cosines and sines, or a gate and its factor.
std::vector<at::Tensor> Heads(at::ScalarType dtype) {
  at::manual_seed(4);
  return {at::randn({2, 5, 3, 14}).transpose(1, 2).to(dtype),
          at::randn({5, 14}).to(dtype), at::randn({5, 14}).to(dtype)};
}
std::vector<at::Tensor> Gate(at::ScalarType dtype) {
  at::manual_seed(5);
  return {at::randn({3, 1021}).to(dtype), at::randn({3, 1021}).to(dtype)};
}

// Returns the result on `device`, and the gradients of the sum of its squares
// by the first `inputs` arguments.
std::vector<at::Tensor> Results(const Function& function,
                                const std::vector<at::Tensor>& arguments,
                                size_t inputs, c10::Device device) {
  std::vector<at::Tensor> moved;
  for (size_t i = 0; i < arguments.size(); ++i) {
    moved.push_back(
        arguments[i].to(device).detach().requires_grad_(i < inputs));
  }
  const at::Tensor y = function(moved);
  (y * y).sum().backward();
  std::vector<at::Tensor> results = {y.detach().cpu()};
  for (size_t i = 0; i < inputs; ++i) {
    results.push_back(moved[i].grad().cpu());
  }
  return results;
}

void ExpectSameBits(const Function& function, const Function& plain,
                    const std::vector<at::Tensor>& arguments, size_t inputs) {
  const std::vector<at::Tensor> expected =
      Results(plain, arguments, inputs, at::kCPU);
  for (const c10::Device device :
       {c10::Device(at::kCPU), FakeDevice::device()}) {
    const std::vector<at::Tensor> actual =
        Results(function, arguments, inputs, device);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(Difference(actual[i], expected[i]), "")
          << arguments[0].dtype() << " on " << device << ", result " << i;
    }
  }
}

TEST(FusedLayersTest, DevicesWithoutKernelsHaveTheBitsOfLibTorchsOperators) {
  FakeDevice::Register();
  for (const at::ScalarType dtype : kDtypes) {
    ExpectSameBits(RotationOf, PlainRotationOf, Heads(dtype), 1);
    ExpectSameBits(SwiGluOf, PlainSwiGluOf, Gate(dtype), 2);
    const at::Tensor logits = at::randn({3, 257}).to(dtype);
    const at::Tensor targets = at::tensor({5, -1, 256}, at::kLong);
    const at::Tensor moved = logits.to(FakeDevice::device());
    const at::Tensor losses = CrossEntropyOfRows(
        moved, targets.to(FakeDevice::device()), -1, /*gradient=*/true);
    EXPECT_EQ(
        Difference(losses.cpu(), CrossEntropyOfRows(logits, targets, -1, true)),
        "");
    EXPECT_EQ(Difference(moved.cpu(), logits), "");
  }
}

TEST(FusedLayersTest, AreRightWhereTheCpuRoundsOnce) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    testing::ExpectRotationsRoundOnce(at::kCPU, dtype);
    testing::ExpectSwiGlusRoundOnce(at::kCPU, dtype);
    testing::ExpectCrossEntropiesRoundOnce(at::kCPU, dtype);
  }
}

// Returns gradients of the sum of squares of a gradient.
std::vector<at::Tensor> SecondGradients(const Function& function,
                                        std::vector<at::Tensor> arguments,
                                        size_t inputs) {
  for (size_t i = 0; i < inputs; ++i) arguments[i].requires_grad_();
  const torch::autograd::variable_list leaves(
      arguments.begin(), arguments.begin() + static_cast<int64_t>(inputs));
  const at::Tensor y = function(arguments);
  const at::Tensor first =
      torch::autograd::grad({(y * y * y).sum()}, leaves, /*grad_outputs=*/{},
                            /*retain_graph=*/true, /*create_graph=*/true)[0];
  return torch::autograd::grad({(first * first).sum()}, leaves);
}

TEST(FusedLayersTest, GradientsHaveGradients) {
  const auto expect = [](const Function& function, const Function& plain,
                         const std::vector<at::Tensor>& arguments,
                         size_t inputs) {
    const auto actual = SecondGradients(function, arguments, inputs);
    const auto expected = SecondGradients(plain, arguments, inputs);
    for (size_t i = 0; i < inputs; ++i) {
      EXPECT_TRUE(actual[i].allclose(expected[i], 1e-9, 1e-9)) << i;
    }
  };
  expect(RotationOf, PlainRotationOf, Heads(at::kDouble), 1);
  expect(SwiGluOf, PlainSwiGluOf, Gate(at::kDouble), 2);
}

TEST(RotateHalvesTest, ExacterTablesGiveAnExacterResult) {
  std::vector<at::Tensor> heads = Heads(at::kBFloat16);
  heads[1] = heads[1].to(at::kFloat);
  heads[2] = heads[2].to(at::kFloat);
  const at::Tensor y = RotationOf(heads);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  EXPECT_EQ(Difference(y, PlainRotationOf(heads)), "");
}

// Exponentials of such logits are infinite or zero.
TEST(CrossEntropyOfRowsTest, LargeLogitsAreFinite) {
  const at::Tensor logits = at::full({2, 2}, 1e4);
  logits.select(1, 1).fill_(-1e4);
  const at::Tensor losses =
      CrossEntropyOfRows(logits, at::tensor({0, 1}, at::kLong), -1, true);
  EXPECT_EQ(losses[0].item<double>(), 0);
  EXPECT_EQ(losses[1].item<double>(), 2e4);
  EXPECT_EQ(logits[1][0].item<double>(), 1);
  EXPECT_EQ(logits[1][1].item<double>(), -1);
}

TEST(FusedLayersTest, RefuseWhatDoesNotFit) {
  const at::Tensor x = at::zeros({1, 2, 3, 4}), table = at::zeros({3, 4});
  EXPECT_THROW(RotateHalves(x[0], table, table), c10::Error);
  EXPECT_THROW(RotateHalves(x, table[0], table[0]), c10::Error);
  EXPECT_THROW(RotateHalves(x, table, table.slice(0, 1)), c10::Error);
  EXPECT_THROW(
      RotateHalves(x.slice(3, 1), table.slice(1, 1), table.slice(1, 1)),
      c10::Error);
  EXPECT_THROW(SwiGlu(table, table[0]), c10::Error);
  EXPECT_THROW(SwiGlu(table, table.to(at::kHalf)), c10::Error);
  const at::Tensor targets = at::zeros({3}, at::kLong);
  const auto loss = [](const at::Tensor& logits, const at::Tensor& targets) {
    CrossEntropyOfRows(logits, targets, -1, /*gradient=*/false);
  };
  EXPECT_NO_THROW(loss(table.clone(), targets));
  EXPECT_THROW(loss(table.t(), targets), c10::Error);
  EXPECT_THROW(loss(table, targets.slice(0, 1)), c10::Error);
  EXPECT_THROW(loss(table, targets.to(at::kInt)), c10::Error);
  EXPECT_THROW(loss(table.clone(), at::full({3}, 4, at::kLong)), c10::Error);
  // A kernel would take an address of the host for one of its own.
  const at::Tensor away = table.to(at::kMeta);
  const auto says = [](const char* text) {
    return ::testing::ThrowsMessage<c10::Error>(::testing::HasSubstr(text));
  };
  EXPECT_THAT([&] { RotateHalves(x, away, away); }, says("cannot turn"));
  EXPECT_THAT([&] { SwiGlu(table, away); }, says("SwiGLU of"));
  EXPECT_THAT([&] { loss(away, targets); }, says("cross entropy of"));
}

}  // namespace
}  // namespace fsdp::device_ops
