// Models of different shapes that know nothing of units, compared with plain
// ones.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/rnn.h>

#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/models/transparent_training.h"

namespace fsdp::testing::transparent_nets {
namespace {

class Interleaved : public Mlp {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = first->forward(first->forward(x).tanh()).tanh();
    return third->forward(first->forward(second->forward(y).tanh()) +
                          second->forward(y));
  }
};

TEST(TransparentTest, UnitsUsedTwiceAndInTurns) {
  ExpectTrainsAsPlain<Interleaved, torch::nn::LinearImpl>();
}

// One operator takes parameters of several units.
class Mixed : public Mlp {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::linear(x, first->weight, second->bias).tanh();
    const at::Tensor w =
        at::cat({first->weight, second->weight, third->weight});
    const at::Tensor z = at::linear(third->forward(y), w).view({-1, 3, kDim});
    return z.sum(1) + first->bias;
  }
};

TEST(TransparentTest, OperatorsThatTakeParametersOfSeveralUnits) {
  ExpectTrainsAsPlain<Mixed, torch::nn::LinearImpl>();
}

// A view outlives the use of its unit, and is used while another one computes.
class Views : public Mlp {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor transposed = first->weight.t();
    const at::Tensor row = second->weight[0];
    const at::Tensor y = second->forward(first->forward(x));
    return third->forward(y.matmul(transposed) * row);
  }
};

TEST(TransparentTest, ViewsOfParameters) {
  ExpectTrainsAsPlain<Views, torch::nn::LinearImpl>();
}

// Uses modules of LibTorch that pass lists of parameters, or views, to one
// operator.
class Library : public torch::nn::Module {
 public:
  Library()
      : lstm(register_module("lstm", torch::nn::LSTM(kDim, kDim))),
        attention(register_module(
            "attention", torch::nn::MultiheadAttention(
                             torch::nn::MultiheadAttentionOptions(kDim, 1)))),
        tail(register_module(
            "tail", torch::nn::Sequential(Linear(kDim, kDim), torch::nn::GELU(),
                                          Linear(kDim, kDim)))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor sequence = std::get<0>(lstm->forward(x.unsqueeze(1)));
    const at::Tensor seen =
        std::get<0>(attention->forward(sequence, sequence, sequence));
    return tail->forward(seen.squeeze(1));
  }
  torch::nn::LSTM lstm;
  torch::nn::MultiheadAttention attention;
  torch::nn::Sequential tail;
};

TEST(TransparentTest, ModulesOfLibTorch) {
  ExpectTrainsAsPlain<Library, torch::nn::LSTMImpl, torch::nn::LinearImpl,
                      torch::nn::MultiheadAttentionImpl>();
}

// Calls some children by fsdp::Forward and others directly.
class MixedCalls : public torch::nn::Module {
 public:
  MixedCalls()
      : first(register_module("first", std::make_shared<Layer>())),
        second(register_module("second", std::make_shared<Layer>())),
        middle(register_module("middle", Linear(kDim, kDim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = middle->forward(Forward(first, x));
    return Forward(middle, Forward(second, y) + second->forward(y));
  }
  std::shared_ptr<Layer> first, second;
  Linear middle;
};

TEST(TransparentTest, BesideUnitsCalledByForward) {
  ExpectTrainsAsPlain<MixedCalls, Layer, torch::nn::LinearImpl>();
  ExpectTrainsAsPlain<MixedCalls, Layer>();
}

}  // namespace
}  // namespace fsdp::testing::transparent_nets
