#include "fsdp/optim/training_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TensorRange ShardWith(const at::Tensor& gradient) {
  TensorRange named{
      "weight", {gradient.numel()}, {1}, 0, at::zeros_like(gradient)};
  named.values.set_requires_grad(true);
  named.values.mutable_grad() = gradient.clone();
  return named;
}

// Tests on one rank.
class ShardedGradScalerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
    world_ = comm::Record(std::move(group[0]), &log_);
  }

  ShardedGradScaler Make(const GradScalerOptions& options = {}) {
    absl::StatusOr<ShardedGradScaler> scaler =
        ShardedGradScaler::Create(*world_, options);
    EXPECT_OK(scaler);
    return *std::move(scaler);
  }

  CollectiveLog log_;
  std::unique_ptr<Communicator> world_;
  const std::vector<TensorRange> fine_ = {ShardWith(at::full({3}, 8.0))};
  const std::vector<TensorRange> broken_ = {
      ShardWith(at::full({3}, kInfinity))};
};

// --- Protocol ----------------------------------------------------------------

TEST_F(ShardedGradScalerTest, RefusesNumbersOutsideTheirRanges) {
  for (const GradScalerOptions& options :
       std::vector<GradScalerOptions>{{true, 0},
                                      {true, -1},
                                      {true, kInfinity},
                                      {true, kNan},
                                      {true, 1, 1},
                                      {true, 1, kNan},
                                      {true, 1, kInfinity},
                                      {true, 1, 2, 0},
                                      {true, 1, 2, 1},
                                      {true, 1, 2, kNan},
                                      {true, 1, 2, .5, 0}}) {
    EXPECT_THAT(ShardedGradScaler::Create(*world_, options),
                StatusIs(Code::kInvalidArgument,
                         HasSubstr("gradient scaler: init_scale")));
  }
}

TEST_F(ShardedGradScalerTest, ScalesTheLossAndUnscalesItsGradient) {
  ShardedGradScaler scaler = Make();
  EXPECT_EQ(scaler.scale(), 65536);
  const at::Tensor weight = at::full({1}, 3.0).requires_grad_();
  scaler.Scale(weight * 5).backward();
  EXPECT_EQ(weight.grad().item<float>(), 5 * 65536);
  EXPECT_THAT(scaler.Unscale({{"weight", {1}, {1}, 0, weight}}), IsOk());
  EXPECT_EQ(weight.grad().item<float>(), 5);
}

TEST_F(ShardedGradScalerTest, UnscalingTwiceIsRefusedUntilTheUpdate) {
  ShardedGradScaler scaler = Make();
  EXPECT_OK(scaler.Unscale(fine_));
  EXPECT_THAT(scaler.Unscale(fine_),
              StatusIs(Code::kFailedPrecondition,
                       HasSubstr("Unscale() a second time")));
  EXPECT_EQ(fine_[0].values.grad()[0].item<float>(), 8.0 / 65536);
  EXPECT_OK(scaler.Update());
  EXPECT_OK(scaler.Unscale(fine_));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_OK(scaler.Update());
}

TEST_F(ShardedGradScalerTest, UpdatingWithoutGradientsIsRefused) {
  ShardedGradScaler scaler = Make();
  EXPECT_THAT(scaler.Update(), StatusIs(Code::kFailedPrecondition,
                                        HasSubstr("without Unscale()")));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_OK(scaler.Update());
  EXPECT_THAT(scaler.Update(), ::testing::Not(IsOk()));
}

TEST_F(ShardedGradScalerTest, StepUnscalesAtMostOnce) {
  ShardedGradScaler scaler = Make();
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_EQ(fine_[0].values.grad()[0].item<float>(), 8.0 / 65536);
  // This may be another optimizer, whose gradients are still scaled.
  EXPECT_THAT(scaler.Step([] {}, fine_),
              StatusIs(Code::kFailedPrecondition,
                       HasSubstr("with several optimizers")));
  EXPECT_OK(scaler.Update());
  EXPECT_OK(scaler.Unscale(fine_));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_THAT(log_.Trace(), SizeIs(2));
}

TEST_F(ShardedGradScalerTest, StepsAnOptimizerOrACallUnlessSomethingIsInf) {
  ShardedGradScaler scaler = Make();
  torch::optim::SGD optimizer({broken_[0].values, fine_[0].values}, 1.0);
  int calls = 0;
  for (const std::vector<TensorRange>* shards : {&broken_, &fine_}) {
    const bool steps = shards == &fine_;
    ASSERT_OK_AND_ASSIGN(const bool found_inf, scaler.Unscale(*shards));
    EXPECT_EQ(found_inf, !steps);
    ASSERT_OK_AND_ASSIGN(const bool called,
                         scaler.Step([&calls] { ++calls; }, *shards));
    ASSERT_OK_AND_ASSIGN(const bool stepped, scaler.Step(optimizer, *shards));
    EXPECT_EQ(called, steps);
    EXPECT_EQ(stepped, steps);
    EXPECT_EQ(calls, steps ? 1 : 0);
    EXPECT_EQ(fine_[0].values[0].item<float>() != 0, steps);
    EXPECT_OK(scaler.Update());
    broken_[0].values.mutable_grad().zero_();
  }
  EXPECT_EQ(scaler.scale(), 32768);
}

TEST_F(ShardedGradScalerTest, AnOptimizerThatThrowsIsAStatus) {
  ShardedGradScaler scaler = Make();
  EXPECT_THAT(scaler.Step([] { TORCH_CHECK(false, "no state"); }, fine_),
              StatusIs(Code::kInternal, HasSubstr("optimizer step")));
}

TEST_F(ShardedGradScalerTest, NotEnabledLeavesEverythingAlone) {
  GradScalerOptions options;
  options.enabled = false;
  ShardedGradScaler scaler = Make(options);
  EXPECT_EQ(scaler.scale(), 1);
  const at::Tensor loss = at::full({1}, 3.0);
  EXPECT_TRUE(scaler.Scale(loss).is_same(loss));
  int calls = 0;
  for (int step = 1; step < 3; ++step) {
    ASSERT_OK_AND_ASSIGN(const bool found_inf, scaler.Unscale(broken_));
    EXPECT_FALSE(found_inf);
    ASSERT_OK_AND_ASSIGN(const bool stepped,
                         scaler.Step([&calls] { ++calls; }, broken_));
    EXPECT_TRUE(stepped);
    EXPECT_EQ(calls, step);
    EXPECT_OK(scaler.Update());
  }
  EXPECT_THAT(log_.Trace(), SizeIs(0));
}

// --- The scale ---------------------------------------------------------------

TEST_F(ShardedGradScalerTest, GrowsAndBacksOffAsTorchDoes) {
  for (const int interval : {1, 2, 3}) {
    for (const auto& [growth, backoff] :
         std::vector<std::pair<float, float>>{{2, .5}, {3, .1}}) {
      ShardedGradScaler scaler = Make({true, 65536, growth, backoff, interval});
      at::Tensor scale = at::full({1}, 65536.0);
      at::Tensor tracker = at::zeros({1}, at::kInt);
      for (int step = 0; step < 40; ++step) {
        const bool broken = step % 7 == 2 || step % 11 == 3;
        EXPECT_OK(scaler.Unscale(broken ? broken_ : fine_));
        EXPECT_OK(scaler.Update());
        at::_amp_update_scale_(scale, tracker,
                               at::full({1}, broken ? 1.0 : 0.0), growth,
                               backoff, interval);
        EXPECT_EQ(scaler.scale(), scale.item<float>()) << step;
        EXPECT_EQ(scaler.state().growth_tracker, tracker.item<int>()) << step;
      }
    }
  }
}

TEST_F(ShardedGradScalerTest, TheScaleStaysFiniteAndPositive) {
  ShardedGradScaler scaler = Make({true, 1e38F, 4, .5, 1});
  EXPECT_OK(scaler.Unscale(fine_));
  EXPECT_OK(scaler.Update());
  EXPECT_EQ(scaler.scale(), 1e38F);
  for (int step = 0; step < 400; ++step) {
    EXPECT_OK(scaler.Unscale(broken_));
    EXPECT_OK(scaler.Update());
  }
  EXPECT_GT(scaler.scale(), 0);
  EXPECT_TRUE(std::isfinite(1 / scaler.scale()));
}

TEST_F(ShardedGradScalerTest, GoesOnFromItsState) {
  const GradScalerOptions options = {true, 64, 2, .5, 3};
  ShardedGradScaler unbroken = Make(options);
  for (int steps = 0; steps < 8; ++steps) {
    ShardedGradScaler resumed = Make(options);
    EXPECT_OK(resumed.SetState(unbroken.state()));
    for (ShardedGradScaler* scaler : {&unbroken, &resumed}) {
      EXPECT_OK(scaler->Unscale(fine_));
      EXPECT_OK(scaler->Update());
    }
    EXPECT_EQ(resumed.scale(), unbroken.scale());
    EXPECT_EQ(resumed.state().growth_tracker, unbroken.state().growth_tracker);
  }
  EXPECT_EQ(unbroken.scale(), 256);
  EXPECT_EQ(unbroken.state().growth_tracker, 2);
  for (const GradScalerState& state : std::vector<GradScalerState>{
           {0, 0}, {-1, 0}, {kInfinity, 0}, {kNan, 0}, {1, -1}}) {
    EXPECT_THAT(unbroken.SetState(state),
                StatusIs(Code::kInvalidArgument,
                         HasSubstr("state of a gradient scaler")));
  }
  EXPECT_EQ(unbroken.scale(), 256);
}

// --- Several ranks -----------------------------------------------------------

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kHalf,
                                      at::kBFloat16};

TEST(ShardedGradScalerOfRanksTest, UnscalesEveryDtypeBesideEmptyOnes) {
  for (const int world_size : {1, 2, 3, 5}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& c) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(ShardedGradScaler scaler,
                            ShardedGradScaler::Create(c, {true, 256}));
      std::vector<TensorRange> shards = {ShardWith(at::empty({0}))};
      for (const at::ScalarType dtype : kDtypes) {
        shards.push_back(ShardWith(at::arange(31, dtype)));
        // Only some ranks have a gradient.
        shards.push_back(ShardWith(at::arange(7 * c.rank(), dtype)));
        if (c.rank() == 1) shards.back().values.mutable_grad().reset();
      }
      FSDP_ASSIGN_OR_RETURN(const bool found_inf, scaler.Unscale(shards));
      FSDP_RETURN_IF_ERROR(Check(!found_inf, "found what is not there"));
      for (const TensorRange& named : shards) {
        const at::Tensor& gradient = named.values.grad();
        if (!gradient.defined()) continue;
        FSDP_RETURN_IF_ERROR(
            Check(at::equal(gradient * 256,
                            at::arange(gradient.numel(), gradient.options())),
                  "another gradient"));
      }
      return absl::OkStatus();
    }));
  }
}

TEST(ShardedGradScalerOfRanksTest, AllRanksFindWhatOneHas) {
  for (const int world_size : {2, 3, 5}) {
    for (const at::ScalarType dtype : kDtypes) {
      for (const float bad : {kInfinity, -kInfinity, kNan}) {
        EXPECT_OK(RunAllRanks(world_size, [&](Communicator& c) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(auto scaler, ShardedGradScaler::Create(c));
          // Rank 0 has no elements, the last rank has those that are not
          // finite.
          const int64_t numel = c.rank() == 0 ? 0 : 13;
          std::vector<TensorRange> shards = {
              ShardWith(at::full({numel}, 1.0, dtype))};
          if (c.rank() == world_size - 1) {
            shards[0].values.mutable_grad()[12] = bad;
          }
          bool called = false;
          FSDP_ASSIGN_OR_RETURN(
              const bool stepped,
              scaler.Step([&called] { called = true; }, shards));
          FSDP_RETURN_IF_ERROR(scaler.Update());
          return Check(!stepped && !called && scaler.scale() == 32768,
                       "not skipped");
        }));
      }
    }
  }
}

TEST(ShardedGradScalerOfRanksTest, TakesOneAllReduce) {
  RecordedRanks ranks(2);
  EXPECT_THAT(RunRanks(ranks.group,
                       [](Communicator& c) -> absl::Status {
                         FSDP_ASSIGN_OR_RETURN(ShardedGradScaler scaler,
                                               ShardedGradScaler::Create(c));
                         std::vector<TensorRange> shards;
                         for (const at::ScalarType dtype : kDtypes) {
                           shards.push_back(ShardWith(at::full({3}, 1, dtype)));
                         }
                         return scaler.Unscale(shards).status();
                       }),
              Each(IsOk()));
  for (const CollectiveLog& log : ranks.logs) {
    ASSERT_THAT(log.Trace(), SizeIs(1));
    EXPECT_EQ(ToString(log.Trace()[0]),
              "all-reduce of unscaling gradients by 65536, 4 bytes");
  }
}

// --- Averages ----------------------------------------------------------------

at::Tensor Parameter(double value, at::ScalarType dtype = at::kFloat) {
  return at::tensor({value, -value}, at::kDouble).to(dtype).requires_grad_();
}

void Set(const at::Tensor& parameter, double value) {
  parameter.detach().copy_(Parameter(value));
}

double Value(const at::Tensor& tensor) { return tensor[0].item<double>(); }

TEST(WeightAverageTest, IsAnExponentialMovingAverage) {
  // In bfloat16, a change of a tenth of 1/256 would be lost.
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor parameter = Parameter(1, dtype);
    const at::Tensor frozen = Parameter(7).requires_grad_(false);
    WeightAverage average({parameter, frozen});
    EXPECT_FALSE(average.Of(frozen).defined());
    EXPECT_EQ(Value(average.Of(parameter)), 1);
    Set(parameter, 2);
    ASSERT_OK(average.Update(0.9));  // the first one copies
    Set(parameter, 2 + 1.0 / 64);
    ASSERT_OK(average.Update(0.9));
    Set(parameter, 3);
    ASSERT_OK(average.Update(0.75));
    const double expected = 0.75 * (2 + 0.1 / 64) + 0.25 * 3;
    EXPECT_NEAR(Value(average.Of(parameter)), expected, 1e-6) << dtype;
    EXPECT_NEAR(average.Of(parameter)[1].item<double>(), -expected, 1e-6);
    EXPECT_EQ(average.Of(parameter).scalar_type(),
              dtype == at::kBFloat16 ? at::kFloat : dtype);
    EXPECT_FALSE(average.Of(parameter).requires_grad());
    EXPECT_EQ(Value(parameter), 3);
  }
}

TEST(WeightAverageTest, IsInTheModelForAWhile) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const std::vector<at::Tensor> parameters = {Parameter(1, dtype),
                                                Parameter(5, dtype)};
    WeightAverage average(parameters);
    EXPECT_OK(average.InModel([&] { EXPECT_EQ(Value(parameters[1]), 5); }));
    ASSERT_OK(average.Update(0.5));
    Set(parameters[0], 2);
    Set(parameters[1], 7);
    ASSERT_OK(average.Update(0.5));
    const auto use = [&] {
      EXPECT_TRUE(average.is_in_model());
      EXPECT_EQ(Value(parameters[0]), 1.5);
      EXPECT_EQ(Value(parameters[1]), 6);
      EXPECT_THAT(average.Update(0.5),
                  StatusIs(Code::kFailedPrecondition, HasSubstr("InModel")));
      EXPECT_EQ(average.InModel([] {}).code(), Code::kFailedPrecondition);
    };
    EXPECT_OK(average.InModel(use));
    EXPECT_EQ(average.InModel([&] { return absl::DataLossError("mine"); }),
              absl::DataLossError("mine"));
    EXPECT_THAT(
        average.InModel([] { throw std::runtime_error("thrown by mine"); }),
        StatusIs(Code::kUnknown, HasSubstr("thrown by mine")));
    EXPECT_FALSE(average.is_in_model());
    EXPECT_EQ(Value(parameters[0]), 2);
    EXPECT_EQ(Value(parameters[1]), 7);
    const void* const memory = average.Of(parameters[0]).const_data_ptr();
    EXPECT_OK(average.InModel(use));
    EXPECT_EQ(average.Of(parameters[0]).const_data_ptr(), memory);
    ASSERT_OK(average.Update(0));
    EXPECT_EQ(Value(average.Of(parameters[1])), 7);
    // Where the second cannot be exchanged, the first is as before.
    Set(parameters[0], 3);
    at::Tensor(parameters[1]).set_data(at::ones({1}, dtype).expand({2}));
    EXPECT_FALSE(average.InModel([] {}).ok());
    EXPECT_EQ(Value(parameters[0]), 3);
  }
}

TEST(WeightAverageTest, RefusesWhatIsNoDecay) {
  WeightAverage average({Parameter(1)});
  for (const double decay : {-0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(average.Update(decay),
                StatusIs(Code::kInvalidArgument, HasSubstr("between 0 and 1")));
  }
}

// --- Learning rates ----------------------------------------------------------

TEST(WarmUpCosineTest, RisesInALineAndFallsAsACosine) {
  const auto rate = [](int64_t step) {
    return 8 * WarmUpCosine::At(step, {/*warm_up=*/4, /*steps=*/16,
                                       /*floor=*/0.25});
  };
  EXPECT_DOUBLE_EQ(rate(0), 2);
  EXPECT_DOUBLE_EQ(rate(1), 4);
  EXPECT_DOUBLE_EQ(rate(3), 8);
  EXPECT_DOUBLE_EQ(rate(4), 8);
  // A third of the way: cos(60 degrees) is a half.
  EXPECT_DOUBLE_EQ(rate(8), 2 + 6 * 0.75);
  EXPECT_DOUBLE_EQ(rate(10), 2 + 6 * 0.5);
  EXPECT_DOUBLE_EQ(rate(16), 2);
  EXPECT_DOUBLE_EQ(rate(1000), 2);
  // Without a warm-up the first step has the peak, and the last one of a run
  // that is all warm-up.
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(0, {0, /*steps=*/2, /*floor=*/0}), 1);
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(1, {0, /*steps=*/2, /*floor=*/0}), 0.5);
  EXPECT_DOUBLE_EQ(WarmUpCosine::At(2, {/*warm_up=*/3, /*steps=*/3, 0}), 1);
}

TEST(WarmUpCosineTest, GroupsHaveTheirOwnPeaksAndTheRateOfTheNextStep) {
  using torch::optim::SGDOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : {8.0, 2.0}) {
    groups.emplace_back(
        std::vector<at::Tensor>{at::ones({1}).set_requires_grad(true)},
        std::make_unique<SGDOptions>(rate));
  }
  torch::optim::SGD optimizer(groups, SGDOptions(1));
  const WarmUpCosineOptions options{/*warm_up=*/2, /*steps=*/8, /*floor=*/0.5};
  WarmUpCosine scheduler(optimizer, options);
  const std::vector<double> parts = {0.5, 1, 1, WarmUpCosine::At(3, options),
                                     WarmUpCosine::At(4, options)};
  for (const double part : parts) {
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), 8 * part);
    EXPECT_DOUBLE_EQ(optimizer.param_groups()[1].options().get_lr(), 2 * part);
    optimizer.step();
    scheduler.step();
  }
  optimizer.add_param_group(std::move(groups.front()));
  EXPECT_THROW(scheduler.SetRates(), c10::Error);
}

}  // namespace
}  // namespace fsdp::testing
