#include "checkpoint/run/training_json.h"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <memory>

#include "absl/strings/str_replace.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

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

}  // namespace
}  // namespace fsdp::checkpoint
