#include <ATen/TensorOperators.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>

#include "fsdp/optim/training_step.h"
#include "fsdp/testing/sharded_test.h"
#include "ranges/tensor_range.h"

namespace fsdp::testing {
namespace {

using ::testing::Not;

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

  comm::CollectiveLog log_;
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
                StatusIs(absl::StatusCode::kInvalidArgument,
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
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("Unscale() a second time")));
  EXPECT_EQ(fine_[0].values.grad()[0].item<float>(), 8.0 / 65536);
  EXPECT_OK(scaler.Update());
  EXPECT_OK(scaler.Unscale(fine_));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_OK(scaler.Update());
}

TEST_F(ShardedGradScalerTest, UpdatingWithoutGradientsIsRefused) {
  ShardedGradScaler scaler = Make();
  EXPECT_THAT(scaler.Update(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                        HasSubstr("without Unscale()")));
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_OK(scaler.Update());
  EXPECT_THAT(scaler.Update(), Not(IsOk()));
}

TEST_F(ShardedGradScalerTest, StepUnscalesAtMostOnce) {
  ShardedGradScaler scaler = Make();
  EXPECT_OK(scaler.Step([] {}, fine_));
  EXPECT_EQ(fine_[0].values.grad()[0].item<float>(), 8.0 / 65536);
  // This may be another optimizer, whose gradients are still scaled.
  EXPECT_THAT(scaler.Step([] {}, fine_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
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
  EXPECT_THAT(
      scaler.Step([] { TORCH_CHECK(false, "no state"); }, fine_),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("optimizer step")));
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
                StatusIs(absl::StatusCode::kInvalidArgument,
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
          FSDP_ASSIGN_OR_RETURN(ShardedGradScaler scaler,
                                ShardedGradScaler::Create(c));
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
  for (const comm::CollectiveLog& log : ranks.logs) {
    ASSERT_THAT(log.Trace(), SizeIs(1));
    EXPECT_EQ(ToString(log.Trace()[0]),
              "all-reduce of unscaling gradients by 65536, 4 bytes");
  }
}

}  // namespace
}  // namespace fsdp::testing
