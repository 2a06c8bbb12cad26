// A store that fails at any moment: an error on all ranks, none of them left
// waiting, and after a failed step of the optimizer a model as it was before.
#include <torch/optim/adamw.h>

#include <array>

#include "absl/synchronization/notification.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/trained_values.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp::testing {
namespace {

using ::fsdp::comm::testing::RunRefusedRanks;
using ::fsdp::offload::testing::Fault;
using Model = FullyShardedDataParallel<NetImpl>;
constexpr int kRanks = 2;
constexpr int64_t kDim = 5;
constexpr int kSteps = 4;
constexpr char kInjected[] = "injected failure";

// The faults of one rank's store of one kind.
struct Plan {
  int rank = 0;
  RestingKind kind = RestingKind::kOptimizer;
  std::vector<Fault> faults;
  // These rest in stores; everything else stays in memory.
  enum class Away { kAll, kStates, kParameters, kGradients };
  Away away = Away::kAll;
  bool two_groups = false;
  // With so few pages, every use is a transfer.
  int64_t buffer_pages = 10;
};

using Away = Plan::Away;

OffloadOptions Offloading(int rank, const Plan& plan) {
  OffloadOptions offload;
  offload.parameters = offload.gradients = offload.optimizer = Tier::kSsd;
  const auto here = [&](Away kind) {
    return plan.away != Away::kAll && plan.away != kind;
  };
  if (here(Away::kParameters)) offload.parameters = Tier::kDevice;
  if (here(Away::kGradients)) offload.gradients = Tier::kDevice;
  if (here(Away::kStates)) offload.optimizer = Tier::kDevice;
  offload.buffer_bytes = plan.buffer_pages * offload::kPageBytes;
  offload.make_store = [rank, plan](RestingKind kind, int64_t capacity)
      -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
    FSDP_ASSIGN_OR_RETURN(auto store,
                          offload::testing::RollingHostStore(capacity));
    if (rank != plan.rank || kind != plan.kind) return store;
    return offload::testing::WithFaults(std::move(store), plan.faults);
  };
  return offload;
}

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const OffloadOptions& offload) {
  Options options = BlockUnits();
  options.offload = offload;
  return FullyShard(MakeNet(kDim, /*num_blocks=*/2), Unowned(world), options);
}

absl::StatusOr<Model> MakeModel(Communicator& world, const Plan& plan) {
  return MakeModel(world, Offloading(world.rank(), plan));
}

// With two groups, each unit has parameters in both.
FusedAdamW MakeAdamW(Model& model, bool two_groups = false) {
  const torch::optim::AdamWOptions options(1e-2);
  std::vector<at::Tensor> groups[2];
  int next = 0;
  for (const at::Tensor& shard : model->Parameters()) {
    groups[two_groups ? next++ % 2 : 0].push_back(shard);
  }
  FusedAdamW optimizer(groups[0], options);
  if (two_groups) {
    optimizer.add_param_group(
        {groups[1], std::make_unique<torch::optim::AdamWOptions>(
                        torch::optim::AdamWOptions(1e-3).weight_decay(0))});
  }
  return optimizer;
}

absl::Status Backward(Model& model, int step) {
  const int rank = model->communicator().rank();
  const at::Tensor x = Rows(int64_t{3} * (step * kRanks + rank), 3, kDim);
  absl::Status status;
  status.Update(TorchToStatus("forward", [&] {
    status = model->Backward(Loss(model->forward(x), x));
  }));
  return status;
}

absl::Status Step(FusedAdamW& optimizer) {
  return TorchToStatus("step", [&] { optimizer.step(); });
}

// Returns the values at the end of an undisturbed run.
absl::StatusOr<Values> Undisturbed(Communicator& world, bool two_groups) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, OffloadOptions()));
  FusedAdamW optimizer = MakeAdamW(model, two_groups);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(Backward(model, step));
    FSDP_RETURN_IF_ERROR(Step(optimizer));
  }
  return ValuesOf(*model, optimizer);
}

// The outcome of a disturbed run on a rank.
struct Outcome {
  int failed_steps = 0;
  absl::Status ended;  // where something else failed, which ends the run
};

// Repeats a failed step, which must have changed nothing.
absl::StatusOr<Outcome> Disturbed(Communicator& world, const Plan& plan,
                                  const Values& expected) {
  Outcome outcome;
  absl::StatusOr<Model> made = MakeModel(world, plan);
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
  for (const Outcome& outcome : outcomes) {
    if (outcome.failed_steps > 0) return false;
  }
  return AllOk(results).ok();
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
          FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, plan));
          FusedAdamW optimizer = MakeAdamW(model);
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
        FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, plan));
        FusedAdamW optimizer = MakeAdamW(model);
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
      FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, plan));
      FusedAdamW optimizer = MakeAdamW(model);
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

TEST(OffloadFaultsTest, WhatIsHeldAcrossAStepIsRefusedOnAllRanks) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Values expected,
                          Undisturbed(world, /*two_groups=*/false));
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, Plan()));
    FusedAdamW optimizer = MakeAdamW(model);
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      FSDP_RETURN_IF_ERROR(Backward(model, step));
      {
        Resident held;
        if (world.rank() == 1) {
          FSDP_ASSIGN_OR_RETURN(
              held, Resident::Of(model->Parameters().back(), Use::kRead));
        }
        FSDP_RETURN_IF_ERROR(CheckRefused(Step(optimizer), "fsdp::Resident"));
      }
      FSDP_RETURN_IF_ERROR(Step(optimizer));
    }
    FSDP_ASSIGN_OR_RETURN(const Values actual, ValuesOf(*model, optimizer));
    return CheckEqual(actual, expected);
  }));
}

// Rank 1 finds it before it knows the parameters that it steps with others.
TEST(OffloadFaultsTest, AParameterThatCannotBeSteppedIsRefusedOnAllRanks) {
  const auto step = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, Plan()));
    std::vector<at::Tensor> parameters = model->Parameters();
    if (world.rank() == 1) {
      parameters.insert(parameters.begin(), torch::zeros({2}, at::kLong));
    }
    FusedAdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    return Step(optimizer);
  };
  EXPECT_THAT(RunRefusedRanks(kRanks, step),
              AllRefuse("rank 1: stepping parameter 0 of group 0: it "
                        "has dtype Long",
                        Code::kInvalidArgument));
}

TEST(OffloadFaultsTest, ASecondOptimizerIsToldOfTheFirst) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, Plan()));
    FusedAdamW first = MakeAdamW(model);
    FusedAdamW second = MakeAdamW(model);
    FSDP_RETURN_IF_ERROR(Backward(model, 0));
    FSDP_RETURN_IF_ERROR(Step(first));
    return CheckRefused(Step(second), "another optimizer",
                        Code::kAlreadyExists);
  }));
}

TEST(OffloadFaultsTest, AStoreThatCannotBeMadeIsRefusedOnAllRanks) {
  const std::vector<absl::Status> results =
      RunRanks(kRanks, [](Communicator& world) {
        OffloadOptions offload = Offloading(world.rank(), Plan());
        if (world.rank() == 1) {
          offload.make_store = [](RestingKind, int64_t)
              -> absl::StatusOr<std::unique_ptr<offload::ParamStore>> {
            return absl::ResourceExhaustedError("the disk is full");
          };
        }
        return MakeModel(world, offload).status();
      });
  EXPECT_THAT(results,
              AllRefuse("rank 1: making the store of parameters: the disk is "
                        "full",
                        Code::kResourceExhausted));
}

TEST(OffloadFaultsTest, AnOptimizerWithMoreStateThanPlannedIsToldWhatToSet) {
  EXPECT_OK(RunAllRanks(kRanks, [](Communicator& world) -> absl::Status {
    OffloadOptions offload = Offloading(world.rank(), Plan());
    offload.optimizer_state = 0.001;
    offload.buffer_bytes = 4 << 20;
    Options options = BlockUnits();
    options.offload = offload;
    FSDP_ASSIGN_OR_RETURN(Model model, FullyShard(MakeNet(/*dim=*/160, 2),
                                                  Unowned(world), options));
    FusedAdamW optimizer(model->Parameters(), torch::optim::AdamWOptions(1e-2));
    const at::Tensor x = Rows(0, 3, 160);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    return CheckRefused(Step(optimizer), "optimizer_state",
                        Code::kResourceExhausted);
  }));
}

TEST(OffloadFaultsTest, AnotherOptimizerIsToldWhichOnesCan) {
  EXPECT_OK(RunAllRanks(1, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world, Plan()));
    torch::optim::AdamW optimizer(model->Parameters());
    EXPECT_THAT(CheckOptimizer(*model, optimizer),
                StatusIs(Code::kFailedPrecondition, _));
    FSDP_RETURN_IF_ERROR(
        CheckOptimizer(*model, FusedAdamW(model->Parameters())));
    const at::Tensor x = Rows(0, 3, kDim);
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    return CheckRefused(TorchToStatus("step", [&] { optimizer.step(); }),
                        "FusedAdamW");
  }));
}

}  // namespace
}  // namespace fsdp::testing
