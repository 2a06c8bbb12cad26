// A store that fails at any moment: an error on all ranks, none of them left
// waiting, and after a failed step of the optimizer a model as it was before.
#include <torch/optim/adamw.h>

#include <array>

#include "absl/synchronization/notification.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/testing/trained_values.h"
#include "fsdp/tests/memory/offload_fault_plan.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing::offload_faults {
namespace {

using ::fsdp::offload::testing::Fault;

// The outcome of a disturbed run on a rank.
struct Outcome {
  int failed_steps = 0;
  absl::Status ended;  // where something else failed, which ends the run
};

// Repeats a failed step, which must have changed nothing.
absl::StatusOr<Outcome> Disturbed(Communicator& world, const Plan& plan,
                                  const Values& expected) {
  Outcome outcome;
  absl::StatusOr<Model> made = MakeModel(world, Offloading(world.rank(), plan));
  outcome.ended = made.status();
  if (!made.ok()) return outcome;
  Model model = *std::move(made);
  FusedAdamW optimizer = MakeAdamW(model, plan.two_groups);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    outcome.ended = Backward(model, step);
    if (!outcome.ended.ok()) return outcome;
    absl::StatusOr<Values> before = Values();
    if (step == kSteps - 1) before = ValuesOf(*model, optimizer);
    outcome.ended = before.status();
    if (!before.ok()) return outcome;
    absl::Status stepped = Step(optimizer);
    if (!stepped.ok()) {
      ++outcome.failed_steps;
      if (!absl::StrContains(stepped.message(), kInjected) ||
          !absl::StrContains(stepped.message(), "as before it")) {
        return Annotate(stepped, "an unclear error");
      }
      if (!before->empty()) {
        FSDP_ASSIGN_OR_RETURN(const Values after, ValuesOf(*model, optimizer));
        FSDP_RETURN_IF_ERROR(CheckEqual(after, *before));
      }
      stepped = Step(optimizer);
    }
    FSDP_RETURN_IF_ERROR(stepped);
  }
  const absl::StatusOr<Values> values = ValuesOf(*model, optimizer);
  outcome.ended = values.status();
  if (values.ok()) FSDP_RETURN_IF_ERROR(CheckEqual(*values, expected));
  return outcome;
}

// Lets transfers fail, each in a run of its own and ever farther apart, until a
// run has no such transfer. `check` gets the outcomes of each rank.
template <typename Check>
void FailEach(Fault fault, Plan plan, const Check& check) {
  std::vector<Values> expected(kRanks);
  ASSERT_OK(RunAllRanks(kRanks, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(expected[world.rank()],
                          Undisturbed(world, plan.two_groups));
    return absl::OkStatus();
  }));
  constexpr int kMost = 400;
  for (int64_t nth = 0; nth < kMost; nth += 1 + nth / 8) {
    fault.nth = nth;
    plan.rank = static_cast<int>(nth % kRanks);
    plan.faults = {fault};
    std::vector<Outcome> outcomes(kRanks);
    const std::vector<absl::Status> results =
        RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(outcomes[world.rank()],
                                Disturbed(world, plan, expected[world.rank()]));
          return outcomes[world.rank()].ended;
        });
    if (!check(nth, outcomes, results)) return;
  }
  FAIL() << "a run has more transfers than are tried";
}

// Returns whether the run has reached its end without a failure.
bool NothingFailed(const std::vector<Outcome>& outcomes,
                   const std::vector<absl::Status>& results) {
  for (const absl::Status& result : results) {
    if (!result.ok()) return false;
  }
  for (const Outcome& outcome : outcomes) {
    if (outcome.failed_steps > 0) return false;
  }
  return true;
}

// Expects that all ranks had the same failures.
void ExpectOneStory(int64_t nth, const std::vector<Outcome>& outcomes,
                    const std::vector<absl::Status>& results) {
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(results[rank].ok(), results[0].ok())
        << nth << ": " << results[rank] << " and " << results[0];
    EXPECT_EQ(outcomes[rank].failed_steps, outcomes[0].failed_steps) << nth;
    if (results[rank].ok()) continue;
    // A forward or backward has failed, and all ranks know of it.
    EXPECT_FALSE(outcomes[rank].ended.ok()) << nth << ": " << results[rank];
    EXPECT_THAT(std::string(results[rank].message()), HasSubstr(kInjected))
        << nth;
  }
}

// Lets each read of states fail, which only steps and state dicts do. Returns
// how many failed.
int FailEachRead(const Plan& plan) {
  Fault fault;
  fault.operation = Fault::Operation::kRead;
  int failures = 0;
  FailEach(fault, plan,
           [&](int64_t nth, const auto& outcomes, const auto& results) {
             if (NothingFailed(outcomes, results)) return false;
             ExpectOneStory(nth, outcomes, results);
             ++failures;
             return true;
           });
  return failures;
}

// Lets the first transfers of `kind` fail, up to `most`. Returns how many runs
// that disturbed.
int FailFirst(RestingKind kind, int64_t most) {
  Plan plan;
  plan.kind = kind;
  int failures = 0;
  FailEach(Fault(), plan,
           [&](int64_t nth, const auto& outcomes, const auto& results) {
             ExpectOneStory(nth, outcomes, results);
             failures += !NothingFailed(outcomes, results);
             return nth < most;
           });
  return failures;
}

TEST(OffloadFaultsTest, AStateThatCannotBeReadUndoesTheStepOnAllRanks) {
  EXPECT_GT(FailEachRead(Plan()), 5);
}

TEST(OffloadFaultsTest, AStateThatCannotBeGatheredIsToldToAllRanks) {
  int failures = 0;
  for (int64_t nth = 0; nth < 60; ++nth) {
    Fault fault;
    fault.operation = Fault::Operation::kRead;
    fault.nth = nth;
    Plan plan;
    plan.faults = {fault};
    plan.away = Away::kStates;
    plan.buffer_pages = 4;
    std::array<absl::Status, kRanks> gathered;
    std::array<absl::Notification, kRanks> done;
    const auto results =
        RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
          FSDP_ASSIGN_OR_RETURN(
              Model model, MakeModel(world, Offloading(world.rank(), plan)));
          FusedAdamW optimizer = MakeAdamW(model, /*two_groups=*/false);
          for (int step = 0; step < kSteps; ++step) {
            optimizer.zero_grad();
            FSDP_RETURN_IF_ERROR(Backward(model, step));
            FSDP_RETURN_IF_ERROR(Step(optimizer));
          }
          gathered[world.rank()] =
              model->GatherOptimizerState(optimizer).status();
          done[world.rank()].Notify();
          // A rank that returns would end the others by that.
          return done[1 - world.rank()].WaitForNotificationWithTimeout(
                     absl::Seconds(30))
                     ? absl::OkStatus()
                     : absl::DeadlineExceededError("the other rank waits");
        });
    if (!done[0].HasBeenNotified()) continue;  // a step has failed
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_OK(results[rank]) << nth;
      EXPECT_EQ(gathered[rank].ok(), gathered[0].ok()) << nth;
      if (gathered[rank].ok()) continue;
      EXPECT_THAT(std::string(gathered[rank].message()), HasSubstr(kInjected));
    }
    failures += !gathered[0].ok();
  }
  EXPECT_GT(failures, 0);
}

TEST(OffloadFaultsTest, ParametersInMemoryAreUndoneWithTheirStates) {
  for (const bool two_groups : {false, true}) {
    Plan plan;
    plan.away = Away::kStates;
    plan.two_groups = two_groups;
    EXPECT_GT(FailEachRead(plan), 5);
  }
}

TEST(OffloadFaultsTest, AStateThatCannotBeWrittenIsNotLost) {
  for (const auto effect : {Fault::Effect::kFail, Fault::Effect::kShorten,
                            Fault::Effect::kRefuse}) {
    Fault fault;
    fault.operation = Fault::Operation::kWrite;
    fault.effect = effect;
    fault.error = absl::ResourceExhaustedError(
        absl::StrCat(kInjected, ": no space left on device"));
    FailEach(fault, Plan(),
             [&](int64_t nth, const auto& outcomes, const auto& results) {
               ExpectOneStory(nth, outcomes, results);
               return nth < 60;
             });
  }
}

TEST(OffloadFaultsTest, AShardThatCannotBeMovedEndsTheRunOrTheStepOfAllRanks) {
  EXPECT_GT(FailFirst(RestingKind::kParameters, 80), 5);
}

TEST(OffloadFaultsTest, AGradientThatCannotBeMovedEndsTheRunOfAllRanks) {
  EXPECT_GT(FailFirst(RestingKind::kGradients, 60), 5);
}

// States in memory cannot be undone, and no error says that they were.
TEST(OffloadFaultsTest, WithoutStatesInStoresAFailedStepStaysAsItIs) {
  for (const auto& [away, kind] :
       {std::pair{Away::kParameters, RestingKind::kParameters},
        {Away::kGradients, RestingKind::kGradients}}) {
    bool told = false;
    for (int64_t nth = 0; nth < 40 && !told; ++nth) {
      Plan plan;
      plan.away = away;
      plan.kind = kind;
      // Two gradients may be in memory.
      plan.buffer_pages = away == Away::kGradients ? 2 : 1;
      plan.faults.emplace_back().operation = Fault::Operation::kRead;
      plan.faults.back().nth = nth;
      std::vector<absl::Status> steps(kRanks);
      RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(Model model,
                              MakeModel(world, Offloading(world.rank(), plan)));
        FusedAdamW optimizer = MakeAdamW(model, /*two_groups=*/false);
        FSDP_RETURN_IF_ERROR(Backward(model, 0));
        steps[world.rank()] = Step(optimizer);
        return absl::OkStatus();
      });
      for (const absl::Status& step : steps) {
        EXPECT_FALSE(absl::StrContains(step.message(), "as before it")) << step;
        told |= absl::StrContains(step.message(), "stays so");
      }
    }
    EXPECT_TRUE(told);
  }
}

// The copies of parameters that undo a step are in the states' store, which can
// no longer be read.
TEST(OffloadFaultsTest, AfterAStepThatCouldNotBeUndoneNoOtherBegins) {
  bool told = false;
  for (int64_t nth = 0; nth < 40 && !told; ++nth) {
    Plan plan;
    plan.away = Away::kStates;
    plan.buffer_pages = 3;  // the copies are written, not only kept
    plan.faults.emplace_back().operation = Fault::Operation::kRead;
    plan.faults.back().nth = nth;
    plan.faults.back().count = 1000;
    std::vector<absl::Status> steps(kRanks), next(kRanks);
    RunRanks(kRanks, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(Model model,
                            MakeModel(world, Offloading(world.rank(), plan)));
      FusedAdamW optimizer = MakeAdamW(model, /*two_groups=*/false);
      absl::Status& step = steps[world.rank()];
      for (int i = 0; i < kSteps && step.ok(); ++i) {
        FSDP_RETURN_IF_ERROR(Backward(model, i));
        step = Step(optimizer);
      }
      next[world.rank()] = Step(optimizer);
      return absl::OkStatus();
    });
    for (int rank = 0; rank < kRanks; ++rank) {
      if (!absl::StrContains(steps[rank].message(), "could not be undone")) {
        continue;
      }
      told = true;
      EXPECT_TRUE(absl::IsFailedPrecondition(next[rank])) << next[rank];
      EXPECT_THAT(std::string(next[rank].message()),
                  HasSubstr("make the model anew"));
    }
  }
  EXPECT_TRUE(told);
}

}  // namespace
}  // namespace fsdp::testing::offload_faults
