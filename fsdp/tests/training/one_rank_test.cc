// On one rank, gradients are neither packed nor sent: their bits equal plain
// LibTorch's, whoever else holds what autograd computes.
#include <ATen/ATen.h>
#include <torch/nn/pimpl.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

// Has parameters whose gradients are fresh, one tensor for two, expanded, with
// other strides, a part of another tensor, sparse, or missing.
class OddImpl : public torch::nn::Module {
 public:
  explicit OddImpl(bool is_sparse)
      : left(register_parameter("left", at::empty({4, 6}))),
        right(register_parameter("right", at::empty({4, 6}))),
        weight(register_parameter("weight", at::empty({5, 6}).t())),
        gain(register_parameter("gain", at::empty({5}))),
        added(register_parameter("added", at::empty({4, 5}))),
        table(register_parameter("table", at::empty({3, 5}))),
        unused(register_parameter("unused", at::empty({7}))),
        is_sparse_(is_sparse) {
    FillParameters(*this, 5);
  }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor sum = (x + left) + right;
    const at::Tensor both = at::cat({sum, left.t().contiguous().t()});
    const at::Tensor y = both.matmul(weight).tanh().narrow(0, 2, 4) * gain;
    const at::Tensor rows =
        at::embedding(table, at::tensor({2, 0, 2, 1}), /*padding_idx=*/-1,
                      /*scale_grad_by_freq=*/false, is_sparse_);
    return y + rows + added;
  }

  at::Tensor left, right, weight, gain, added, table, unused;

 private:
  const bool is_sparse_;
};
TORCH_MODULE(Odd);

using Model = FullyShardedDataParallel<OddImpl>;
using Gradients = std::map<std::string, at::Tensor>;

at::Tensor Inputs() { return Rows(0, 4, 6); }

// Returns plain LibTorch's gradients in the order of the parameters' memory.
Gradients PlainGradients(bool is_sparse) {
  Odd odd(is_sparse);
  odd->forward(Inputs()).sum().backward();
  Gradients gradients;
  for (const auto& item : odd->named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) continue;
    const at::Tensor ordered =
        at::empty_like(item.value().detach()).copy_(gradient.to_dense());
    gradients[item.key()] = ordered.as_strided({ordered.numel()}, {1});
  }
  return gradients;
}

absl::Status CheckGradients(const Model& model, const Gradients& expected) {
  size_t count = 0;
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    if (!gradient.defined()) continue;
    EXPECT_TRUE(gradient.equal(expected.at(named.name))) << named.name;
    ++count;
  }
  EXPECT_EQ(expected.size(), 6u);  // all but the one without a use
  EXPECT_EQ(count, expected.size());
  return CheckThat(model->memory_stats().gradients.allocations, Eq(0),
                   "buffers of gradients");
}

TEST(OneRankTest, OneBackward) {
  for (const bool is_sparse : {false, true}) {
    EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(
          Model model, FullyShard(Odd(is_sparse), Unowned(world), Options()));
      FSDP_RETURN_IF_ERROR(model->Backward(model->forward(Inputs()).sum()));
      return CheckGradients(model, PlainGradients(is_sparse));
    }));
  }
}

// Writes to a gradient must not reach what a hook, or another gradient, has.
TEST(OneRankTest, WhatHooksKeepIsNotTheGradient) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    Odd odd(/*is_sparse=*/false);
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(odd, Unowned(world), Options()));
    Tensors seen;
    for (const at::Tensor& p : odd->parameters()) {
      p.register_hook([&seen](const at::Tensor& gradient) {
        seen.push_back(gradient);
        return gradient;
      });
    }
    FSDP_RETURN_IF_ERROR(model->Backward(model->forward(Inputs()).sum()));
    Tensors values;
    for (const at::Tensor& gradient : seen) values.push_back(gradient.clone());
    Gradients expected = PlainGradients(/*is_sparse=*/false);
    const c10::NoGradGuard no_grad;
    for (const TensorRange& named : model->Ranges()) {
      if (!named.values.grad().defined()) continue;
      named.values.mutable_grad().mul_(3);
      expected.at(named.name).mul_(3);
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      FSDP_RETURN_IF_ERROR(
          CheckTensor(seen[i], values[i], "gradient that a hook has seen"));
    }
    return CheckGradients(model, expected);
  }));
}

}  // namespace
}  // namespace fsdp::testing
