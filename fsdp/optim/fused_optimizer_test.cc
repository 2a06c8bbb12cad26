#include "fsdp/optim/fused_optimizer.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "base/torch_status.h"
#include "fsdp/optim/fused_runs.h"
#include "fsdp/testing/fused_optimizer_cases.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FusedOptimizerTest;
using ::fsdp::testing::Kind;
using ::fsdp::testing::Kinds;
using ::fsdp::testing::Load;
using ::fsdp::testing::Of;
using ::fsdp::testing::Saved;
using ::fsdp::testing::Shards;
using ::fsdp::testing::Sizes;
using ::fsdp::testing::SomeAt;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

INSTANTIATE_TEST_SUITE_P(Kinds, FusedOptimizerTest,
                         ::testing::ValuesIn(Kinds()),
                         [](const ::testing::TestParamInfo<Kind>& info) {
                           return info.param.name;
                         });

// Returns thirds of the leaves with learning rates of their own; `adapt`
// changes the options of the last one.
std::vector<OptimizerParamGroup> Thirds(const std::vector<at::Tensor>& leaves,
                                        const Kind& kind) {
  std::vector<OptimizerParamGroup> groups;
  const auto third = static_cast<int64_t>(leaves.size() / 3);
  for (int64_t g = 0; g < 3; ++g) {
    const auto begin = leaves.begin() + g * third;
    const auto end = g == 2 ? leaves.end() : begin + third;
    std::unique_ptr<OptimizerOptions> options = kind.options();
    options->set_lr(options->get_lr() * static_cast<double>(1 + g));
    if (auto* adamw = dynamic_cast<AdamWOptions*>(options.get()); g == 2) {
      if (adamw != nullptr) adamw->betas({0.8, 0.9}).weight_decay(0.2);
    }
    groups.emplace_back(std::vector<at::Tensor>(begin, end),
                        std::move(options));
  }
  return groups;
}

TEST_P(FusedOptimizerTest, IsTorchsOverGroupsSchedulesAndMissingGradients) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  for (Shards* each : {&expected, &shards}) {
    each->leaves[8].set_requires_grad(false);
  }
  const auto plain = GetParam().make_plain(Thirds(expected.leaves, GetParam()));
  const auto fused = GetParam().make_fused(Thirds(shards.leaves, GetParam()));
  torch::optim::StepLR plain_rates(*plain, 4, 0.5);
  torch::optim::StepLR fused_rates(*fused, 4, 0.5);
  for (int step = 0; step < 20; ++step) {
    const auto has = [&](size_t i) { return i != 8 && SomeAt(step)(i); };
    expected.SetGradients(step, has);
    shards.SetGradients(step, has);
    plain->step();
    fused->step();
    plain_rates.step();
    fused_rates.step();
    EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6)) << step;
  }
  EXPECT_TRUE(shards.leaves[8].equal(Shards(Sizes()).leaves[8]));
  EXPECT_FALSE(shards.leaves[7].equal(Shards(Sizes()).leaves[7]));
}

at::Tensor TrainedFor(int steps, Shards shards, Optimizer& optimizer) {
  for (int step = 0; step < steps; ++step) {
    shards.SetGradients(step, SomeAt(step));
    optimizer.step();
  }
  return shards.All();
}

TEST_P(FusedOptimizerTest, StepsMergedSlicesToTheSameBitsAsSlicesApart) {
  const Shards merged(Sizes());
  const Shards apart = merged.Apart();
  const auto of_merged = Of(GetParam().make_fused, merged.leaves);
  const auto of_apart = Of(GetParam().make_fused, apart.leaves);
  EXPECT_TRUE(TrainedFor(12, merged, *of_merged)
                  .equal(TrainedFor(12, apart, *of_apart)));
}

// Trains a tensor of 1000 elements over `ranks`, whose parts end anywhere.
at::Tensor TrainedOver(int64_t ranks, const Kind& kind) {
  std::vector<int64_t> sizes;
  sizes.reserve(ranks);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sizes.push_back((rank + 1) * 1000 / ranks - rank * 1000 / ranks);
  }
  const Shards shards = Shards(std::move(sizes)).Apart();
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  optimizers.reserve(shards.leaves.size());
  for (const at::Tensor& leaf : shards.leaves) {
    optimizers.push_back(Of(kind.make_fused, {leaf}));
  }
  Shards gradients = shards;
  for (int step = 0; step < 5; ++step) {
    gradients.SetGradients(step);
    for (const auto& optimizer : optimizers) optimizer->step();
  }
  return shards.All();
}

TEST_P(FusedOptimizerTest, GivesTheSameBitsForAnyNumberOfRanksAndThreads) {
  const at::Tensor whole = TrainedOver(1, GetParam());
  for (int64_t ranks : {2, 3, 5, 7, 1000}) {
    EXPECT_TRUE(TrainedOver(ranks, GetParam()).equal(whole)) << ranks;
  }
  at::set_num_threads(3);
  EXPECT_TRUE(TrainedOver(3, GetParam()).equal(whole));
  at::set_num_threads(1);
}

// Compares with the same steps in double.
TEST_P(FusedOptimizerTest, StepsOtherDtypes) {
  for (at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kHalf}) {
    Shards shards(Sizes(), dtype);
    Shards expected = shards.Apart(at::kDouble);
    const auto plain = Of(GetParam().make_plain, expected.leaves);
    const auto fused = Of(GetParam().make_fused, shards.leaves);
    const double tolerance = dtype == at::kDouble ? 1e-12 : 0.03;
    for (int step = 0; step < 3; ++step) {
      shards.SetGradients(step, nullptr, dtype);
      for (size_t i = 0; i < shards.leaves.size(); ++i) {
        // Gradients must not be near zero: their squares would be zero in half.
        at::Tensor gradient = shards.leaves[i].grad();
        gradient.add_(gradient.sign());
        expected.leaves[i].mutable_grad() = gradient.to(at::kDouble);
      }
      plain->step();
      fused->step();
    }
    EXPECT_TRUE(at::allclose(shards.All().to(at::kDouble), expected.All(),
                             tolerance, tolerance))
        << dtype;
    EXPECT_FALSE(shards.All().equal(Shards(Sizes(), dtype).All()));
  }
}

TEST_P(FusedOptimizerTest, ConvertsGradientsOfAnotherDtype) {
  // These need more than one piece of conversion.
  const std::vector<int64_t> sizes = {5, FusedRuns::kConvertedNumel, 3, 1001};
  Shards expected(sizes);
  Shards shards(sizes);
  const auto converted = Of(GetParam().make_fused, expected.leaves);
  const auto fused = Of(GetParam().make_fused, shards.leaves);
  for (int step = 0; step < 2; ++step) {
    shards.SetGradients(step, nullptr, at::kBFloat16);
    for (size_t i = 0; i < sizes.size(); ++i) {
      expected.leaves[i].mutable_grad() =
          shards.leaves[i].grad().to(at::kFloat);
    }
    converted->step();
    fused->step();
  }
  EXPECT_TRUE(shards.All().equal(expected.All()));
}

TEST_P(FusedOptimizerTest, ReadsFilesOfTorchsAndTheOtherWayRound) {
  const Shards one(Sizes());
  Shards expected(Sizes());
  Shards shards(Sizes());
  const auto plain = Of(GetParam().make_plain, expected.leaves);
  TrainedFor(5, expected, *plain);
  {
    c10::NoGradGuard no_grad;
    shards.values.copy_(expected.values);
  }
  // Loads in the middle of another training and replaces its states.
  const auto fused = Of(GetParam().make_fused, shards.leaves);
  const auto resumed = Of(GetParam().make_plain, expected.leaves);
  {
    Shards before(Sizes());
    const auto earlier = Of(GetParam().make_plain, before.leaves);
    TrainedFor(2, before, *earlier);
    Load(Saved(*earlier), *fused);
  }
  Load(Saved(*plain), *fused);
  Load(Saved(*fused), *resumed);
  for (int step = 5; step < 10; ++step) {
    expected.SetGradients(step, SomeAt(step));
    shards.SetGradients(step, SomeAt(step));
    resumed->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
  // Torch's optimizer goes on from there.
  Load(Saved(*fused), *resumed);
  for (int step = 10; step < 15; ++step) {
    expected.SetGradients(step, SomeAt(step));
    shards.SetGradients(step, SomeAt(step));
    resumed->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
}

TEST_P(FusedOptimizerTest, ResumesToTheSameBitsFromItsFile) {
  Shards shards(Sizes());
  Shards resumed(Sizes());
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  TrainedFor(4, shards, *optimizer);
  {
    c10::NoGradGuard no_grad;
    resumed.values.copy_(shards.values);
  }
  const auto loaded = Of(GetParam().make_fused, resumed.leaves);
  Load(Saved(*optimizer), *loaded);
  for (int step = 4; step < 8; ++step) {
    shards.SetGradients(step, SomeAt(step));
    resumed.SetGradients(step, SomeAt(step));
    optimizer->step();
    loaded->step();
  }
  EXPECT_TRUE(resumed.All().equal(shards.All()));
}

TEST_P(FusedOptimizerTest, GoesUpTheGradientWithMaximize) {
  Shards expected(Sizes());
  Shards shards(Sizes());
  const auto plain = Of(GetParam().make_plain, expected.leaves);
  FusedOptions up;
  up.maximize = true;
  std::unique_ptr<Optimizer> fused;
  const std::unique_ptr<OptimizerOptions> options = GetParam().options();
  if (const auto* adamw = dynamic_cast<AdamWOptions*>(options.get())) {
    fused = std::make_unique<FusedAdamW>(shards.leaves, *adamw, up);
  } else if (const auto* adam = dynamic_cast<AdamOptions*>(options.get())) {
    fused = std::make_unique<FusedAdam>(shards.leaves, *adam, up);
  } else {
    fused = std::make_unique<FusedSGD>(
        shards.leaves, dynamic_cast<const SGDOptions&>(*options), up);
  }
  for (int step = 0; step < 5; ++step) {
    expected.SetGradients(step);
    shards.SetGradients(step);
    for (const at::Tensor& leaf : expected.leaves) leaf.grad().neg_();
    plain->step();
    fused->step();
  }
  EXPECT_TRUE(at::allclose(shards.All(), expected.All(), 1e-5, 1e-6));
}

TEST(FusedOptimizerOptionsTest, WhatLibTorchRefusesIsAnInvalidArgument) {
  const std::vector<at::Tensor> none;
  const auto refuses = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  const auto adamw = [&](const AdamWOptions& options) {
    return TorchToStatus("", [&] { FusedAdamW(none, options); });
  };
  EXPECT_OK(adamw(AdamWOptions(0)));
  EXPECT_THAT(adamw(AdamWOptions(-1)), refuses("learning rate: -1"));
  EXPECT_THAT(adamw(AdamWOptions().eps(-1)), refuses("epsilon value: -1"));
  EXPECT_THAT(adamw(AdamWOptions().betas({0.9, 1})), refuses("index 1: 1"));
  EXPECT_THAT(adamw(AdamWOptions().weight_decay(-2)),
              refuses("weight_decay value: -2"));
  EXPECT_THAT(TorchToStatus("", [&] { FusedAdam(none, AdamOptions(-1)); }),
              refuses("learning rate: -1"));
  EXPECT_THAT(TorchToStatus("", [&] { FusedSGD(none, SGDOptions(-1)); }),
              refuses("learning rate: -1"));
}

TEST_P(FusedOptimizerTest, LeavesWhatHasNoGradientWithoutState) {
  Shards shards({5, 70, 3});
  const auto optimizer = Of(GetParam().make_fused, shards.leaves);
  shards.SetGradients(0, [](size_t i) { return i == 1; });
  optimizer->step();
  const Shards before({5, 70, 3});
  EXPECT_TRUE(shards.leaves[0].equal(before.leaves[0]));
  EXPECT_FALSE(shards.leaves[1].equal(before.leaves[1]));
  EXPECT_TRUE(shards.leaves[2].equal(before.leaves[2]));
  EXPECT_EQ(optimizer->state().count(shards.leaves[0].unsafeGetTensorImpl()),
            0u);
}

}  // namespace
}  // namespace fsdp
