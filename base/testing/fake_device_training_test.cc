#include <ATen/ATen.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/testing/fake_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::IsEmpty;

constexpr int64_t kTokens = 13;
constexpr int64_t kWidth = 12;
constexpr int64_t kHeads = 3;
constexpr int kSteps = 3;

// One block of a transformer with an embedding and a head.
struct Net : torch::nn::Module {
  Net() {
    embedding =
        register_module("embedding", torch::nn::Embedding(kTokens, kWidth));
    norm = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    head = register_module("head", torch::nn::Linear(kWidth, kTokens));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = embedding(tokens);
    const std::vector<at::Tensor> parts =
        qkv(norm(x))
            .view({x.size(0), x.size(1), 3 * kHeads, kWidth / kHeads})
            .transpose(1, 2)
            .chunk(3, 1);
    const at::Tensor scores =
        at::matmul(parts[0], parts[1].transpose(-2, -1)) / 2.0;
    const at::Tensor mixed = at::matmul(scores.softmax(-1), parts[2])
                                 .transpose(1, 2)
                                 .reshape(x.sizes());
    return head(at::gelu(x + mixed));
  }

  torch::nn::Embedding embedding = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear qkv = nullptr;
  torch::nn::Linear head = nullptr;
};

using MakeStep =
    std::function<std::function<void()>(const std::vector<at::Tensor>&)>;

std::function<void()> StepOf(
    const std::shared_ptr<torch::optim::Optimizer>& made) {
  return [made] { made->step(); };
}

std::function<void()> AdamW(const std::vector<at::Tensor>& parameters) {
  return StepOf(std::make_shared<torch::optim::AdamW>(parameters));
}

std::function<void()> Sgd(const std::vector<at::Tensor>& parameters) {
  return StepOf(std::make_shared<torch::optim::SGD>(
      parameters, torch::optim::SGDOptions(0.1).momentum(0.9)));
}

std::function<void()> FusedAdamW(const std::vector<at::Tensor>& parameters) {
  struct State {
    std::vector<at::Tensor> parameters, first, second, steps;
  };
  auto state = std::make_shared<State>();
  state->parameters = parameters;
  for (const at::Tensor& parameter : parameters) {
    state->first.push_back(at::zeros_like(parameter));
    state->second.push_back(at::zeros_like(parameter));
    state->steps.push_back(at::zeros({}, parameter.options()));
  }
  return [state] {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : state->parameters) {
      gradients.push_back(parameter.grad());
    }
    at::_foreach_add_(state->steps, 1);
    at::_fused_adamw_(state->parameters, gradients, state->first, state->second,
                      /*max_exp_avg_sqs=*/{}, state->steps, /*lr=*/1e-2,
                      /*beta1=*/0.9, /*beta2=*/0.99, /*weight_decay=*/0.1,
                      /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
  };
}

// Returns the losses and then the parameters after some steps.
std::vector<at::Tensor> Train(c10::Device device, const MakeStep& make_step,
                              int64_t batch) {
  at::manual_seed(7);
  Net net;
  if (!device.is_cpu()) FakeDevice::Move(net.parameters());
  const at::Tensor tokens = at::randint(kTokens, {batch, 5}).to(device);
  const at::Tensor targets = at::randint(kTokens, {batch * 5}).to(device);
  const std::function<void()> step = make_step(net.parameters());
  std::vector<at::Tensor> results;
  FakeDevice::Reset();
  for (int i = 0; i < kSteps; ++i) {
    net.zero_grad();
    const at::Tensor loss = at::nll_loss(
        net.forward(tokens).view({-1, kTokens}).log_softmax(-1), targets);
    loss.backward();
    step();
    results.push_back(loss.detach());
  }
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  for (const at::Tensor& parameter : net.parameters()) {
    results.push_back(parameter.detach());
  }
  return results;
}

class FakeDeviceTraining : public ::testing::TestWithParam<MakeStep> {
 protected:
  FakeDeviceTraining() { FakeDevice::Register(); }
};

TEST_P(FakeDeviceTraining, HasTheBitsOfTheCpu) {
  for (const int64_t batch : {1, 7}) {
    const auto expected =
        Train(c10::Device(c10::DeviceType::CPU), GetParam(), batch);
    const auto actual = Train(FakeDevice::device(), GetParam(), batch);
    EXPECT_THAT(FakeDevice::Races(), IsEmpty());
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_EQ(actual[i].device(), FakeDevice::device());
      EXPECT_TRUE(actual[i].cpu().equal(expected[i])) << i;
    }
    EXPECT_FALSE(actual[0].cpu().equal(actual[kSteps - 1].cpu()));
  }
}

INSTANTIATE_TEST_SUITE_P(Optimizers, FakeDeviceTraining,
                         ::testing::Values(AdamW, Sgd, FusedAdamW));

}  // namespace
}  // namespace fsdp::testing
