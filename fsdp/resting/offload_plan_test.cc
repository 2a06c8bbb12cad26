#include "fsdp/resting/offload_plan.h"

#include "absl/time/time.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;

// Returns four units of 10 MiB with Adam's states; the last one is frozen.
std::vector<RestingFlat> Flats() {
  std::vector<RestingFlat> flats;
  for (const char* name : {"a", "b", "c", "d"}) {
    flats.push_back({name, 10 * kMiB, 10 * kMiB, 20 * kMiB});
  }
  flats.back().gradients = flats.back().optimizer = 0;
  return flats;
}

OffloadOptions ToSsd() {
  OffloadOptions options;
  options.parameters = options.gradients = options.optimizer = Tier::kSsd;
  options.directory = "/scratch";
  return options;
}

OffloadPlan PlanOf(const OffloadOptions& options, bool on_cpu = true) {
  return PlanOffload(Flats(), options, on_cpu).value();
}

absl::Status StatusOf(const OffloadOptions& options, bool on_cpu = true) {
  return PlanOffload(Flats(), options, on_cpu).status();
}

int CountOn(const OffloadPlan& plan, RestingKind kind, Tier tier) {
  int count = 0;
  for (size_t i = 0; i < plan.flats.size(); ++i) {
    count += plan.tier(static_cast<int>(i), kind) == tier;
  }
  return count;
}

TEST(OffloadPlanTest, WithoutABudgetAllThatHasBytesGoesToItsTier) {
  const OffloadPlan plan = PlanOf(ToSsd());
  EXPECT_EQ(plan.of(RestingKind::kParameters).ssd, 40 * kMiB);
  EXPECT_EQ(plan.of(RestingKind::kGradients).ssd, 30 * kMiB);
  EXPECT_EQ(plan.of(RestingKind::kOptimizer).ssd, 60 * kMiB);
  EXPECT_EQ(plan.device_bytes(), plan.buffer_bytes);
  // The last unit has no gradients.
  EXPECT_EQ(plan.tier(3, RestingKind::kGradients), Tier::kDevice);
  EXPECT_EQ(plan.tier(3, RestingKind::kParameters), Tier::kSsd);
}

TEST(OffloadPlanTest, BuffersAreOfTheUnitsAtWorkNotOfTheModel) {
  std::vector<RestingFlat> flats = Flats();
  ASSERT_OK_AND_ASSIGN(const OffloadPlan few,
                       PlanOffload(flats, ToSsd(), /*on_cpu=*/true));
  for (int i = 0; i < 100; ++i) flats.push_back(flats.front());
  ASSERT_OK_AND_ASSIGN(const OffloadPlan many,
                       PlanOffload(flats, ToSsd(), /*on_cpu=*/true));
  EXPECT_EQ(many.buffer_bytes, few.buffer_bytes);
  // At least one unit is read, one stepped and one written, of 40 MiB each.
  EXPECT_GE(few.buffer_bytes, 3 * (40 * kMiB));
  EXPECT_LE(few.buffer_bytes, 4 * (40 * kMiB));
}

TEST(OffloadPlanTest, KeepsParametersThenGradientsThenStates) {
  OffloadOptions options = ToSsd();
  options.buffer_bytes = kMiB;
  options.memory_budget = 61 * kMiB;  // room for 60
  const OffloadPlan plan = PlanOf(options);
  EXPECT_EQ(CountOn(plan, RestingKind::kParameters, Tier::kDevice), 4);
  // Two units with gradients, and the frozen one.
  EXPECT_EQ(CountOn(plan, RestingKind::kGradients, Tier::kDevice), 3);
  EXPECT_EQ(CountOn(plan, RestingKind::kOptimizer, Tier::kDevice), 1);
  EXPECT_EQ(plan.device_bytes(), 61 * kMiB);
  EXPECT_EQ(plan.of(RestingKind::kGradients).ssd, 10 * kMiB);
  EXPECT_EQ(plan.of(RestingKind::kOptimizer).ssd, 60 * kMiB);
}

TEST(OffloadPlanTest, NeverExceedsTheBudget) {
  for (int64_t budget = 0; budget < 200 * kMiB; budget += 3 * kMiB) {
    OffloadOptions options = ToSsd();
    options.memory_budget = budget + 1;
    const absl::StatusOr<OffloadPlan> plan =
        PlanOffload(Flats(), options, /*on_cpu=*/true);
    if (!plan.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(plan.status()));
      continue;
    }
    EXPECT_LE(plan->device_bytes(), budget + 1);
    int64_t rests = 0;
    for (const OffloadPlan::Bytes& kind : plan->bytes) {
      rests += kind.device + kind.ssd;
    }
    EXPECT_EQ(rests, 130 * kMiB);
  }
}

TEST(OffloadPlanTest, WhatFitsWhollyNeedsNoBuffers) {
  OffloadOptions options = ToSsd();
  options.memory_budget = 130 * kMiB;
  const OffloadPlan plan = PlanOf(options);
  EXPECT_EQ(plan.buffer_bytes, 0);
  EXPECT_FALSE(plan.leaves_device());
}

TEST(OffloadPlanTest, RefusesABudgetThatCannotBeKeptWithWhatItNeeds) {
  OffloadOptions options = ToSsd();
  options.parameters = Tier::kDevice;  // 40 MiB
  options.buffer_bytes = 10 * kMiB;
  options.memory_budget = 50 * kMiB - 1;
  EXPECT_THAT(StatusOf(options), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("allow 52428800 bytes")));
  options.memory_budget = 50 * kMiB;
  EXPECT_OK(StatusOf(options));
}

TEST(OffloadPlanTest, OfAModelOnTheCpuTheCpuTierIsTheDevice) {
  OffloadOptions options;
  options.parameters = options.gradients = options.optimizer = Tier::kCpu;
  const OffloadPlan here = PlanOf(options);
  EXPECT_EQ(here.device_bytes(), 130 * kMiB);
  const OffloadPlan there = PlanOf(options, /*on_cpu=*/false);
  EXPECT_EQ(there.device_bytes(), there.transfer_bytes);
  EXPECT_EQ(there.of(RestingKind::kOptimizer).cpu, 60 * kMiB);
}

TEST(OffloadPlanTest, ADeviceHasMemoryForWhatPassesThrough) {
  OffloadOptions options;
  options.parameters = options.gradients = options.optimizer = Tier::kCpu;
  const OffloadPlan stepping = PlanOf(options, /*on_cpu=*/false);
  // A whole unit is on its way up, and another one down.
  EXPECT_EQ(stepping.transfer_bytes, 2 * (40 * kMiB));
  EXPECT_EQ(stepping.buffer_bytes, 0);
  options.step_on = StepOn::kHost;
  const OffloadPlan computing = PlanOf(options, /*on_cpu=*/false);
  EXPECT_EQ(computing.transfer_bytes, 3 * (10 * kMiB) + 3 * (10 * kMiB));
  options.gradients = Tier::kDevice;
  const OffloadPlan parameters = PlanOf(options, /*on_cpu=*/false);
  EXPECT_EQ(parameters.transfer_bytes, 3 * (10 * kMiB));
  EXPECT_EQ(parameters.device_bytes(), 30 * kMiB + 30 * kMiB);
}

TEST(OffloadPlanTest, TheBudgetOfADeviceHasWhatPassesThrough) {
  OffloadOptions options;
  options.parameters = options.gradients = options.optimizer = Tier::kCpu;
  options.memory_budget = 80 * kMiB - 1;
  EXPECT_THAT(StatusOf(options, /*on_cpu=*/false),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("allow 83886080 bytes")));
  for (int64_t budget = 80; budget <= 130; budget += 5) {
    options.memory_budget = budget * kMiB;
    const OffloadPlan plan = PlanOf(options, /*on_cpu=*/false);
    EXPECT_LE(plan.device_bytes(), budget * kMiB);
    EXPECT_EQ(plan.leaves_device(), budget < 130) << budget;
  }
}

TEST(OffloadPlanTest, RefusesOptionsThatCannotBe) {
  OffloadOptions options = ToSsd();
  options.directory.clear();
  EXPECT_THAT(StatusOf(options).message(),
              HasSubstr("OffloadOptions::directory"));
  for (const auto& spoil :
       {+[](OffloadOptions& o) { o.memory_budget = -1; },
        +[](OffloadOptions& o) { o.memory_budget = 0; },
        +[](OffloadOptions& o) { o.buffer_bytes = 0; },
        +[](OffloadOptions& o) { o.timeout = absl::ZeroDuration(); },
        +[](OffloadOptions& o) { o.prefetch_distance = -1; },
        +[](OffloadOptions& o) { o.optimizer_state = -0.5; }}) {
    OffloadOptions spoiled = ToSsd();
    spoil(spoiled);
    EXPECT_TRUE(absl::IsInvalidArgument(StatusOf(spoiled)));
  }
}

TEST(OffloadPlanTest, OnlyWhatIsWhollyInFilesIsKept) {
  OffloadOptions options = ToSsd();
  options.keep = true;
  EXPECT_OK(StatusOf(options));
  for (const auto& spoil :
       {+[](OffloadOptions& o) { o.parameters = Tier::kDevice; },
        +[](OffloadOptions& o) { o.optimizer = Tier::kCpu; },
        +[](OffloadOptions& o) { o.memory_budget = 1 << 30; }}) {
    OffloadOptions spoiled = options;
    spoil(spoiled);
    EXPECT_TRUE(absl::IsInvalidArgument(StatusOf(spoiled)));
  }
}

TEST(OffloadPlanTest, IsPrinted) {
  OffloadOptions options = ToSsd();
  options.buffer_bytes = kMiB;
  options.memory_budget = 61 * kMiB;
  const OffloadPlan plan = PlanOf(options);
  const std::string text = plan.ToString();
  EXPECT_THAT(text, HasSubstr("gradients"));
  EXPECT_THAT(text, HasSubstr("61.00 of a budget of 61.00"));
}

}  // namespace
}  // namespace fsdp
