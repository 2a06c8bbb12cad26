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

at::Tensor Inputs(int index) { return Rows(int64_t{4} * index, 4, 6); }

struct Training {
  Odd module{nullptr};
  std::function<at::Tensor(int index)> loss;
  std::function<absl::Status(const at::Tensor& loss, bool retain)> backward;
  std::function<void()> zero_grad;
  std::function<Tensors()> parameters;  // of optimizers
};

using Program = std::function<absl::Status(Training&)>;

absl::Status RunPlain(const Program& program, bool is_sparse,
                      Gradients& gradients) {
  Training training;
  training.module = Odd(is_sparse);
  Odd& odd = training.module;
  training.loss = [&](int i) { return odd->forward(Inputs(i)).sum(); };
  training.backward = [](const at::Tensor& loss, bool retain) {
    loss.backward({}, retain);
    return absl::OkStatus();
  };
  training.zero_grad = [&] { odd->zero_grad(); };
  training.parameters = [&] { return odd->parameters(); };
  FSDP_RETURN_IF_ERROR(program(training));
  for (const auto& item : odd->named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    if (!gradient.defined()) continue;
    // Brings the gradient into the order of the parameter's memory.
    const at::Tensor ordered =
        at::empty_like(item.value().detach()).copy_(gradient.to_dense());
    gradients[item.key()] = ordered.as_strided({ordered.numel()}, {1});
  }
  return absl::OkStatus();
}

absl::Status RunSharded(Communicator& world, const Program& program,
                        bool is_sparse, Gradients& gradients) {
  Training training;
  training.module = Odd(is_sparse);
  FSDP_ASSIGN_OR_RETURN(Model model,
                        FullyShard(training.module, Unowned(world), Options()));
  training.loss = [&](int i) { return model->forward(Inputs(i)).sum(); };
  training.backward = [&](const at::Tensor& loss, bool retain) {
    return model->Backward(loss, retain);
  };
  training.zero_grad = [&] { model->zero_grad(); };
  training.parameters = [&] { return model->Parameters(); };
  FSDP_RETURN_IF_ERROR(program(training));
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    if (gradient.defined()) gradients[named.name] = gradient;
  }
  const int64_t buffers = model->memory_stats().gradients.allocations;
  return Check(buffers == 0, absl::StrCat(buffers, " buffers"));
}

void ExpectTheBitsOfLibTorch(const Program& program, bool is_sparse = false) {
  Gradients expected;
  ASSERT_OK(RunPlain(program, is_sparse, expected));
  ASSERT_EQ(expected.size(), 6u);  // all but the one without a use
  EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    Gradients actual;
    FSDP_RETURN_IF_ERROR(RunSharded(world, program, is_sparse, actual));
    if (actual.size() != expected.size()) {
      return absl::InternalError(absl::StrCat(actual.size(), " gradients"));
    }
    for (const auto& [name, gradient] : expected) {
      EXPECT_TRUE(actual.at(name).equal(gradient)) << name;
    }
    return absl::OkStatus();
  }));
}

absl::Status Step(Training& training, int index) {
  return training.backward(training.loss(index), /*retain=*/false);
}

TEST(OneRankTest, OneBackward) {
  for (const bool is_sparse : {false, true}) {
    ExpectTheBitsOfLibTorch([](Training& t) { return Step(t, 0); }, is_sparse);
  }
}

TEST(OneRankTest, BackwardsThatAddUp) {
  ExpectTheBitsOfLibTorch([](Training& t) -> absl::Status {
    FSDP_RETURN_IF_ERROR(Step(t, 0));
    FSDP_RETURN_IF_ERROR(Step(t, 1));
    return Step(t, 2);
  });
}

TEST(OneRankTest, TwoBackwardsOfOneGraph) {
  ExpectTheBitsOfLibTorch([](Training& t) -> absl::Status {
    const at::Tensor loss = t.loss(0);
    FSDP_RETURN_IF_ERROR(t.backward(loss, /*retain=*/true));
    return t.backward(loss, /*retain=*/false);
  });
}

TEST(OneRankTest, GradientsThatTheUserKeepsStayWhatTheyAre) {
  ExpectTheBitsOfLibTorch([](Training& t) -> absl::Status {
    Tensors kept;
    Tensors values;
    for (int step = 0; step < 3; ++step) {
      FSDP_RETURN_IF_ERROR(Step(t, step));
      for (const at::Tensor& p : t.parameters()) {
        if (!p.grad().defined()) continue;
        kept.push_back(p.grad());
        values.push_back(p.grad().clone());
      }
      if (step < 2) t.zero_grad();
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      FSDP_RETURN_IF_ERROR(CheckTensor(kept[i], values[i], "kept gradient"));
    }
    return absl::OkStatus();
  });
}

// Writes to a gradient must not reach what a hook, or another gradient, has.
TEST(OneRankTest, WhatHooksKeepIsNotTheGradient) {
  ExpectTheBitsOfLibTorch([](Training& t) -> absl::Status {
    Tensors seen;
    for (const at::Tensor& p : t.module->parameters()) {
      p.register_hook([&seen](const at::Tensor& gradient) {
        seen.push_back(gradient);
        return gradient;
      });
    }
    FSDP_RETURN_IF_ERROR(Step(t, 0));
    Tensors values;
    for (const at::Tensor& gradient : seen) values.push_back(gradient.clone());
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& p : t.parameters()) {
      if (p.grad().defined()) p.mutable_grad().mul_(3);
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      FSDP_RETURN_IF_ERROR(
          CheckTensor(seen[i], values[i], "gradient that a hook has seen"));
    }
    return absl::OkStatus();
  });
}

TEST(OneRankTest, GradientsOfTheUsersAreAddedTo) {
  ExpectTheBitsOfLibTorch([](Training& t) -> absl::Status {
    FSDP_RETURN_IF_ERROR(Step(t, 0));
    const Tensors parameters = t.parameters();
    const at::Tensor own = at::full_like(parameters[0], 0.5);
    parameters[0].mutable_grad() = own;
    parameters[1].mutable_grad().reset();
    FSDP_RETURN_IF_ERROR(Step(t, 1));
    return Check(parameters[0].grad().is_same(own), "another tensor");
  });
}

// Gradients kept whole go through a buffer, which adds to what was taken
// before.
TEST(OneRankTest, WhatIsKeptWholeIsAddedToWhatWasTaken) {
  Gradients expected;
  ASSERT_OK(RunPlain(
      [](Training& t) -> absl::Status {
        for (int i = 0; i < 4; ++i) FSDP_RETURN_IF_ERROR(Step(t, i));
        return absl::OkStatus();
      },
      /*is_sparse=*/false, expected));
  EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    Odd odd(false);
    FSDP_ASSIGN_OR_RETURN(Model model,
                          FullyShard(odd, Unowned(world), Options()));
    const auto step = [&](int i) {
      return model->Backward(model->forward(Inputs(i)).sum());
    };
    FSDP_RETURN_IF_ERROR(step(0));
    {
      const NoSyncScope no_sync = model->NoSync();
      FSDP_RETURN_IF_ERROR(step(1));
      FSDP_RETURN_IF_ERROR(step(2));
    }
    FSDP_RETURN_IF_ERROR(step(3));
    for (const TensorRange& named : model->Ranges()) {
      const auto found = expected.find(named.name);
      const at::Tensor& actual = named.values.grad();
      if (actual.defined() != (found != expected.end())) {
        return absl::InternalError(named.name);
      }
      // The order of sums differs.
      if (actual.defined() && !actual.allclose(found->second, 1e-5, 1e-6)) {
        return absl::InternalError(named.name);
      }
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
