#include "examples/gpt/fused_adamw.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace gpt {
namespace {

// Leaves of several sizes, the same for every call.
std::vector<at::Tensor> MakeParameters() {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
  std::vector<at::Tensor> parameters;
  for (int64_t size : {1, 7, 64, 1000}) {
    parameters.push_back(
        at::randn({size}, generator, at::kFloat).requires_grad_());
  }
  return parameters;
}

void SetGradients(const std::vector<at::Tensor>& parameters, int step) {
  at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(100 + step);
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad() =
        at::randn(parameter.sizes(), generator, at::kFloat);
  }
}

std::vector<at::Tensor> TrainFused(int steps) {
  std::vector<at::Tensor> parameters = MakeParameters();
  FusedAdamW optimizer(parameters, AdamWOptions());
  for (int step = 0; step < steps; ++step) {
    SetGradients(parameters, step);
    optimizer.Step();
  }
  return parameters;
}

TEST(FusedAdamWTest, IsTheAdamWOfTorch) {
  std::vector<at::Tensor> expected = MakeParameters();
  torch::optim::AdamW optimizer(expected, torch::optim::AdamWOptions());
  for (int step = 0; step < 20; ++step) {
    SetGradients(expected, step);
    optimizer.step();
  }
  const std::vector<at::Tensor> parameters = TrainFused(20);
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::allclose(parameters[i], expected[i], 1e-5, 1e-6)) << i;
  }
}

TEST(FusedAdamWTest, GivesTheSameBitsEveryTime) {
  const std::vector<at::Tensor> first = TrainFused(5);
  const std::vector<at::Tensor> second = TrainFused(5);
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(first[i].equal(second[i])) << i;
  }
}

TEST(FusedAdamWTest, LeavesAloneWhatHasNoGradientOrNoElements) {
  std::vector<at::Tensor> parameters = MakeParameters();
  parameters.push_back(at::empty({0}).requires_grad_());
  FusedAdamW optimizer(parameters, AdamWOptions());
  optimizer.Step();
  SetGradients(parameters, 0);
  parameters[1].mutable_grad().reset();
  optimizer.Step();
  const std::vector<at::Tensor> before = MakeParameters();
  EXPECT_FALSE(parameters[0].equal(before[0]));
  EXPECT_TRUE(parameters[1].equal(before[1]));
  optimizer.ZeroGrad();
  for (const at::Tensor& parameter : parameters) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

}  // namespace
}  // namespace gpt
