#include "checkpoint/run/training_json.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <tuple>

#include "absl/strings/str_replace.h"
#include "base/testing/status_matchers.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using torch::optim::OptimizerOptions;
using torch::optim::ReduceLROnPlateauScheduler;
using torch::optim::SGD;
using torch::optim::StepLR;

TrainingRecord Full() {
  TrainingRecord record;
  record.step = int64_t{1} << 40;
  record.world_size = 3;
  OptimizerGroup group;
  group.names = {"a.weight", "b"};
  group.options = std::make_shared<torch::optim::AdamWOptions>(0.1);
  record.groups = {group, OptimizerGroup()};
  record.groups->back().options = std::make_shared<torch::optim::SGDOptions>(1);
  record.slots = {"exp_avg", "exp_avg_sq"};
  record.numbers["a.weight"]["step"] = 7;
  record.numbers["b"]["step"] = -1;
  record.scheduler_steps = {0, std::numeric_limits<uint32_t>::max()};
  record.plateaus = {{std::numeric_limits<float>::infinity(), 1, 2, 3},
                     {-0.1F, 0, 0, 0}};
  record.scaler = GradScalerState{65536.5F, 12};
  record.entries = {{"ä", "\"\n"}, {"", ""}};
  return record;
}

TEST(TrainingJsonTest, ComesBack) {
  const TrainingRecord record = Full();
  ASSERT_OK_AND_ASSIGN(const std::string text, ToText(record));
  ASSERT_OK_AND_ASSIGN(const TrainingRecord back, ParseTraining(text));
  EXPECT_EQ(back.step, record.step);
  EXPECT_EQ(back.world_size, 3);
  ASSERT_EQ(back.groups->size(), 2);
  EXPECT_EQ((*back.groups)[0].names, (*record.groups)[0].names);
  EXPECT_EQ((*back.groups)[0].options->get_lr(), 0.1);
  EXPECT_TRUE((*back.groups)[1].names.empty());
  EXPECT_EQ(back.slots, record.slots);
  EXPECT_EQ(back.numbers, record.numbers);
  EXPECT_EQ(back.scheduler_steps, record.scheduler_steps);
  EXPECT_TRUE(back.plateaus == record.plateaus);
  EXPECT_EQ(back.scaler->scale, 65536.5F);
  EXPECT_EQ(back.scaler->growth_tracker, 12);
  EXPECT_EQ(back.entries, record.entries);
  // And once more: no digit is lost on the way.
  EXPECT_EQ(*ToText(back), text);
}

TEST(TrainingJsonTest, OfARunWithoutAnything) {
  const TrainingRecord record = RecordOf(TrainingRun(), nullptr, 5, 1);
  ASSERT_OK_AND_ASSIGN(const std::string text, ToText(record));
  ASSERT_OK_AND_ASSIGN(const TrainingRecord back, ParseTraining(text));
  EXPECT_EQ(back.step, 5);
  EXPECT_FALSE(back.groups.has_value());
  EXPECT_FALSE(back.scaler.has_value());
}

TEST(TrainingJsonTest, WhatIsNoneIsRefused) {
  const std::string good = *ToText(Full());
  const struct {
    const char* from;
    const char* to;
    const char* why;
  } cases[] = {
      {"libtorch_fsdp training state", "x", "does not say that it is one"},
      {"\"version\": 1", "\"version\": 2", "version 2"},
      {"\"step\": 1099511627776", "\"step\": -1", "\"step\" is no count"},
      {"\"world_size\": 3", "\"world_size\": 1e99", "\"world_size\" is no"},
      {"\"slots\": [", "\"slots\": [1, ", "\"slots\" has what is no text"},
      {"\"growth_tracker\": 12", "\"growth_tracker\": 3000000000", "too large"},
      {"\"best\": \"inf\"", "\"best\": \"high\"", "\"best\" of a scheduler"},
      {"\"entries\": {", "\"entries\": {\"x\": 1, ", "\"x\" is no text"},
      {"\"entries\"", "\"others\"", "\"entries\" are no object"},
      {"\"plateaus\"", "\"more\": 1, \"plateaus\"", "does not know"},
      {"\"AdamW\"", "\"Lion\"", "class Lion"},
  };
  for (const auto& one : cases) {
    const std::string bad = absl::StrReplaceAll(good, {{one.from, one.to}});
    ASSERT_NE(bad, good) << one.from << " in " << good;
    EXPECT_THAT(
        ParseTraining(bad).status(),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(one.why)))
        << one.to;
  }
  for (size_t size = 0; size + 1 < good.size(); size += 7) {
    EXPECT_FALSE(ParseTraining(good.substr(0, size)).ok()) << size;
  }
}

TEST(TrainingJsonTest, ARunThatDoesNotFitIsRefused) {
  TrainingRecord record;
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  torch::optim::StepLR scheduler(optimizer, 3);
  TrainingRun run;
  run.model = model.get();
  EXPECT_OK(CheckFits(record, run));
  run.optimizer = &optimizer;
  EXPECT_THAT(CheckFits(record, run),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no state of an optimizer")));
  record.groups.emplace();
  EXPECT_OK(CheckFits(record, run));
  run.schedulers = {&scheduler};
  EXPECT_THAT(CheckFits(record, run),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the checkpoint has 0 schedulers of learning "
                                 "rates, this run has 1")));
  record.scheduler_steps = {4};
  ASSERT_OK(CheckFits(record, run));
  record.entries["a"] = "b";
  ASSERT_OK(Restore(record, run));
  EXPECT_EQ(StepsOf(scheduler), 4);
  EXPECT_EQ(run.entries.at("a"), "b");
}

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
