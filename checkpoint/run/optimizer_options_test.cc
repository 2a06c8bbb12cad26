#include "checkpoint/run/optimizer_options.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using torch::optim::OptimizerOptions;

// Every option has another value than its default, and none is exact in
// decimal.
std::vector<std::unique_ptr<OptimizerOptions>> AllKinds() {
  std::vector<std::unique_ptr<OptimizerOptions>> all;
  all.push_back(std::make_unique<torch::optim::SGDOptions>(
      torch::optim::SGDOptions(1. / 3)
          .momentum(1. / 7)
          .dampening(1. / 11)
          .weight_decay(1. / 13)
          .nesterov(true)));
  const auto betas = std::make_tuple(2. / 3, 6. / 7);
  all.push_back(std::make_unique<torch::optim::AdamOptions>(
      torch::optim::AdamOptions(1. / 3)
          .betas(betas)
          .eps(1e-7 / 3)
          .weight_decay(1. / 13)
          .amsgrad(true)));
  all.push_back(std::make_unique<torch::optim::AdamWOptions>(
      torch::optim::AdamWOptions(1. / 3)
          .betas(betas)
          .eps(1e-7 / 3)
          .weight_decay(1. / 13)
          .amsgrad(true)));
  all.push_back(std::make_unique<torch::optim::AdagradOptions>(
      torch::optim::AdagradOptions(1. / 3)
          .lr_decay(1. / 7)
          .weight_decay(1. / 13)
          .initial_accumulator_value(1. / 17)
          .eps(1e-9 / 3)));
  all.push_back(std::make_unique<torch::optim::RMSpropOptions>(
      torch::optim::RMSpropOptions(1. / 3)
          .alpha(6. / 7)
          .eps(1e-7 / 3)
          .weight_decay(1. / 13)
          .momentum(1. / 7)
          .centered(true)));
  return all;
}

// What torch::optim itself writes of options is the judge.
std::string Archived(const OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  std::string bytes;
  archive.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  return bytes;
}

TEST(OptimizerOptionsTest, AllKindsComeBackThroughText) {
  for (const auto& options : AllKinds()) {
    const absl::StatusOr<Json> json = OptionsToJson(*options);
    ASSERT_TRUE(json.ok()) << json.status();
    const absl::StatusOr<Json> read = Json::Parse(json->ToString());
    ASSERT_TRUE(read.ok()) << read.status();
    const auto back = OptionsFromJson(*read);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(Archived(**back), Archived(*options)) << json->ToString();
    EXPECT_EQ((*back)->get_lr(), 1. / 3);
  }
}

TEST(OptimizerOptionsTest, WholeNumbersAreNumbers) {
  const auto options = OptionsFromJson(
      *Json::Parse(R"({"class": "SGD", "lr": 1, "momentum": 0, "dampening": 0,
                       "weight_decay": 0, "nesterov": false})"));
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ((*options)->get_lr(), 1);
}

TEST(OptimizerOptionsTest, WhatCannotBeHeldIsRefused) {
  EXPECT_THAT(OptionsToJson(torch::optim::LBFGSOptions(1)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("a class that is not known")));
  EXPECT_THAT(OptionsToJson(torch::optim::AdamWOptions(
                                std::numeric_limits<double>::infinity()))
                  .status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("option lr of AdamW is not finite")));
}

TEST(OptimizerOptionsTest, WhatDoesNotFitIsNamed) {
  const std::string rest =
      R"("momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": false})";
  const struct {
    std::string text;
    const char* why;
  } cases[] = {
      {R"({"lr": 1})", "do not say of which class"},
      {R"({"class": "Lion", "lr": 1})", "class Lion"},
      {R"({"class": "SGD", )" + rest, "\"lr\" is not a number"},
      {R"({"class": "SGD", "lr": "1", )" + rest, "\"lr\" is not a number"},
      {R"({"class": "SGD", "lr": 1, "warmth": 2, )" + rest, "\"warmth\""},
      {R"({"class": "SGD", "lr": 1})", "\"momentum\" is not a number"},
      {R"({"class": "Adam", "lr": 1, "betas": [1], "eps": 1,
           "weight_decay": 0, "amsgrad": false})",
       "\"betas\" is not a pair"},
      {R"({"class": "Adam", "lr": 1, "betas": [0, 1], "eps": 1,
           "weight_decay": 0, "amsgrad": 0})",
       "\"amsgrad\" is not true or false"},
  };
  for (const auto& one : cases) {
    EXPECT_THAT(
        OptionsFromJson(*Json::Parse(one.text)).status(),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(one.why)))
        << one.text;
  }
}

using torch::optim::ReduceLROnPlateauScheduler;
using torch::optim::SGD;
using torch::optim::StepLR;

SGD MakeOptimizer() { return SGD({at::zeros({1})}, /*lr=*/1.0); }

double RateOf(SGD& optimizer) {
  return optimizer.param_groups()[0].options().get_lr();
}

void SetRate(SGD& optimizer, double rate) {
  optimizer.param_groups()[0].options().set_lr(rate);
}

// A scheduler that is given the state of another goes on like that one.
TEST(SchedulerStateTest, StepLRGoesOn) {
  for (int before = 0; before < 7; ++before) {
    SGD unbroken = MakeOptimizer();
    StepLR schedule(unbroken, /*step_size=*/3, /*gamma=*/.5);
    for (int i = 0; i < before; ++i) schedule.step();
    EXPECT_EQ(StepsOf(schedule), before);
    SGD resumed = MakeOptimizer();
    StepLR other(resumed, 3, .5);
    SetSteps(other, StepsOf(schedule));
    SetRate(resumed, RateOf(unbroken));
    for (int i = 0; i < 8; ++i) {
      schedule.step();
      other.step();
      EXPECT_EQ(RateOf(resumed), RateOf(unbroken)) << before << " " << i;
    }
    EXPECT_LT(RateOf(unbroken), 1);
  }
}

TEST(SchedulerStateTest, PlateauGoesOn) {
  const std::vector<float> metrics = {5, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3};
  const auto make = [](SGD& optimizer) {
    return ReduceLROnPlateauScheduler(
        optimizer, ReduceLROnPlateauScheduler::min, /*factor=*/.5F,
        /*patience=*/1, /*threshold=*/1e-4, ReduceLROnPlateauScheduler::rel,
        /*cooldown=*/2);
  };
  for (size_t before = 0; before < metrics.size(); ++before) {
    SGD unbroken = MakeOptimizer();
    ReduceLROnPlateauScheduler schedule = make(unbroken);
    for (size_t i = 0; i < before; ++i) schedule.step(metrics[i]);
    SGD resumed = MakeOptimizer();
    ReduceLROnPlateauScheduler other = make(resumed);
    SetState(other, StateOf(schedule));
    SetRate(resumed, RateOf(unbroken));
    for (size_t i = before; i < metrics.size(); ++i) {
      schedule.step(metrics[i]);
      other.step(metrics[i]);
      EXPECT_EQ(RateOf(resumed), RateOf(unbroken)) << before << " " << i;
    }
    EXPECT_TRUE(StateOf(other) == StateOf(schedule)) << before;
    EXPECT_LT(RateOf(unbroken), 1);
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
