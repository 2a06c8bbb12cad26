#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <vector>

#include "checkpoint/run/optimizer_options.h"
#include "gtest/gtest.h"

namespace fsdp::checkpoint {
namespace {

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

// Each member by itself, so that no two are mixed up.
TEST(SchedulerStateTest, EveryMemberIsItsOwn) {
  SGD optimizer = MakeOptimizer();
  ReduceLROnPlateauScheduler schedule(optimizer);
  const PlateauState state{1.5F, 7, 3, 2};
  SetState(schedule, state);
  const PlateauState back = StateOf(schedule);
  EXPECT_EQ(back.best, 1.5F);
  EXPECT_EQ(back.last_epoch, 7);
  EXPECT_EQ(back.bad_epochs, 3);
  EXPECT_EQ(back.cooldown, 2);
}

}  // namespace
}  // namespace fsdp::checkpoint
