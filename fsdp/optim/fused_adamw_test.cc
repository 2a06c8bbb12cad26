// FusedAdamW by itself: options that change, states, and what it refuses.
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "base/status_error.h"
#include "base/testing/status_matchers.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/fused_optimizer_cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::Load;
using ::fsdp::testing::Random;
using ::fsdp::testing::Saved;
using ::fsdp::testing::Shards;
using ::fsdp::testing::Sizes;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

TEST(FusedAdamWTest, StepsParametersThatLieOtherwiseThanTheirGradients) {
  const auto make = [] {
    return Random(84, 3).view({12, 7}).t().requires_grad_();
  };
  const at::Tensor expected = make();
  const at::Tensor parameter = make();
  torch::optim::AdamW plain({expected});
  FusedAdamW fused(std::vector<at::Tensor>{parameter});
  for (int step = 0; step < 3; ++step) {
    const at::Tensor gradient = Random(84, step).view({7, 12});
    expected.mutable_grad() = gradient;
    parameter.mutable_grad() = gradient;
    plain.step();
    fused.step();
  }
  EXPECT_TRUE(at::allclose(parameter, expected, 1e-5, 1e-6));
}

TEST(FusedAdamWTest, FollowsGroupsAndOptionsThatChange) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  const std::vector<at::Tensor> some(expected.leaves.begin(),
                                     expected.leaves.begin() + 9);
  torch::optim::AdamW plain(some);
  FusedAdamW fused(std::vector<at::Tensor>(shards.leaves.begin(),
                                           shards.leaves.begin() + 9));
  for (int step = 0; step < 9; ++step) {
    expected.SetGradients(step);
    shards.SetGradients(step);
    if (step == 3) {
      plain.add_param_group(OptimizerParamGroup(std::vector<at::Tensor>(
          expected.leaves.begin() + 9, expected.leaves.end())));
      fused.add_param_group(OptimizerParamGroup(std::vector<at::Tensor>(
          shards.leaves.begin() + 9, shards.leaves.end())));
    }
    for (Optimizer* each : std::vector<Optimizer*>{&plain, &fused}) {
      auto& options =
          static_cast<AdamWOptions&>(each->param_groups().back().options());
      options.lr(1e-3 * (step + 1)).weight_decay(step % 2);
    }
    plain.step();
    fused.step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
}

// States also come from a file, whose tensors have memory of their own.
TEST(FusedAdamWTest, KeepsStatesAsTheParametersLie) {
  Shards shards(Sizes());
  FusedAdamW optimizer(shards.leaves);
  for (int step = 0; step < 2; ++step) {
    shards.SetGradients(step);
    optimizer.step();
    int64_t begin = 0;
    std::set<const void*> storages;
    for (const at::Tensor& leaf : shards.leaves) {
      auto& state = static_cast<torch::optim::AdamWParamState&>(
          *optimizer.state().at(leaf.unsafeGetTensorImpl()));
      EXPECT_EQ(state.step(), step + 1);
      EXPECT_EQ(state.exp_avg().storage_offset(), begin);
      storages.insert(state.exp_avg().storage().unsafeGetStorageImpl());
      begin += leaf.numel();
    }
    EXPECT_EQ(storages.size(), 1u);
    Load(Saved(optimizer), optimizer);
  }
}

TEST(FusedAdamWTest, WritesEachStateOnce) {
  Shards shards(std::vector<int64_t>(50, 1000));
  FusedAdamW optimizer(shards.leaves);
  shards.SetGradients(0);
  optimizer.step();
  EXPECT_LT(Saved(optimizer).size(), 2 * 4 * 50000 * 1.5);
}

TEST(FusedAdamWTest, ReturnsTheLossOfItsClosure) {
  const at::Tensor parameter = at::ones({3}).requires_grad_();
  FusedAdamW optimizer(std::vector<at::Tensor>{parameter});
  c10::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    const at::Tensor sum = parameter.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<float>(), 3);
  EXPECT_LT(parameter.sum().item<float>(), 3);
}

absl::Status StatusOfStep(Optimizer& optimizer) {
  try {
    optimizer.step();
  } catch (const StatusError& error) {
    return error.status();
  }
  return absl::OkStatus();
}

TEST(FusedAdamWTest, RefusesWhatTheKernelsCannotStepWithNothingChanged) {
  Shards shards({3, 20});
  FusedAdamW optimizer(shards.leaves);
  shards.SetGradients(0);
  const at::Tensor before = shards.All();
  shards.leaves[1].mutable_grad() = shards.leaves[1].grad().to_sparse();
  EXPECT_THAT(StatusOfStep(optimizer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("parameter 1 of group 0: its gradient is "
                                 "sparse")));
  shards.leaves[1].mutable_grad() = at::ones({19});
  EXPECT_THAT(StatusOfStep(optimizer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("sizes [19], dtype Float, on cpu, and it has "
                                 "sizes [20]")));
  EXPECT_TRUE(shards.All().equal(before));
  EXPECT_TRUE(optimizer.state().empty());

  FusedAdamW of_gaps(std::vector<at::Tensor>{
      at::ones({4, 4}).narrow(1, 0, 2).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_gaps),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("parameter 0 of group 0: it is sparse, or its "
                                 "elements have gaps")));
  FusedAdamW of_complex(std::vector<at::Tensor>{
      at::ones({4}, at::kComplexFloat).requires_grad_()});
  EXPECT_THAT(StatusOfStep(of_complex),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("dtype ComplexFloat")));
}

TEST(FusedAdamWTest, RefusesAStateOfAnotherShape) {
  Shards other({7});
  torch::optim::AdamW written(other.leaves);
  other.SetGradients(0);
  written.step();
  Shards shards({8});
  FusedAdamW optimizer(shards.leaves);
  Load(Saved(written), optimizer);
  shards.SetGradients(0);
  EXPECT_THAT(StatusOfStep(optimizer),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("its state has sizes [7], and it has [8]")));
}

}  // namespace
}  // namespace fsdp
