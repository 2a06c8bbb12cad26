// What a Runtime makes of the gradients of units with several flat parameters,
// of which an action concerns only some.
#include <ATen/ops/zeros.h>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/units.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

TEST(RuntimeUnitsTest, GradientsKeptWholeAreAddedUpAndReducedWithTheLastOnes) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, mine, 1, mine));
    FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, 10 * mine, 1, 0));
    EXPECT_EQ(units.runtime().memory_stats().gradients.in_use_bytes,
              units.reducer().reduce_buffer_bytes(0));
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce}, 0, 100 * mine, 1, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 222));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 1, 3));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 2, 2));
    return units.CheckNothingInUse();
  }));
}

TEST(RuntimeUnitsTest, GradientsKeptWholeOutliveWhatElseIsDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    FSDP_RETURN_IF_ERROR(units.Do({kGather, kWaitGather}, 0));
    FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, 1, 1, 1));
    units.runtime().DropEverything();
    EXPECT_TRUE(units.reducer().HasWholeGradients(0));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 0, 5, 5, 5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 6));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 2, 6));
    return units.CheckNothingInUse();
  }));
}

TEST(RuntimeUnitsTest, TwoReductionsAreReplicatedInTurnShardedOrNot) {
  EXPECT_OK(RunAllRanks(6, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement hybrid, Hybrid(world));
    FSDP_ASSIGN_OR_RETURN(const Placement alone, NotSharded(world));
    const double mine = world.rank() + 1;
    for (const Placement& placement : {hybrid, alone}) {
      Units units(world, placement);
      FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 0, mine, mine, mine));
      FSDP_RETURN_IF_ERROR(
          units.Do({kReplicate, kFill, kReduce}, 0, 10, 10, 10));
      FSDP_RETURN_IF_ERROR(units.Do({kWaitReduce, kReplicate, kWaitReduce}, 0));
      for (int i : {0, 1, 2}) {
        FSDP_RETURN_IF_ERROR(units.CheckGradient(0, i, 13.5));
      }
    }
    return absl::OkStatus();
  }));
}

TEST(RuntimeHooksTest, ReductionsAreCalledWithOwnAsThisRanksPartOfTheWhole) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement placement, Hybrid(world));
    Units units(world, placement);
    std::string calls;
    RuntimeHooks hooks;
    hooks.reduce_scatter = [&](const ReduceScatterCall& call)
        -> absl::StatusOr<std::unique_ptr<comm::Work>> {
      const int64_t own = call.own.numel();
      const bool is_part =
          call.whole.numel() == 2 * own &&
          call.whole.narrow(0, call.group.rank() * own, own).data_ptr() ==
              call.own.data_ptr();
      absl::StrAppend(&calls, is_part ? "scatter " : "? ", call.unit, "; ");
      return call.group.ReduceScatter(call.own, call.whole,
                                      comm::ReduceOp::kSum, call.unit);
    };
    hooks.all_reduce = [&](const AllReduceCall& call)
        -> absl::StatusOr<std::unique_ptr<comm::Work>> {
      absl::StrAppend(&calls, "reduce ", call.unit, "; ");
      return call.group.AllReduce(call.own, comm::ReduceOp::kSum, call.unit);
    };
    units.reducer().SetHooks(std::move(hooks));
    for (int i : {0, 1}) units.Train(0, i, false);
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kReplicate, kWaitReduce}, 0,
                                  0, 0, world.rank() + 1));
    EXPECT_THAT(calls, HasSubstr("scatter first"));
    EXPECT_THAT(calls, HasSubstr("reduce first"));
    EXPECT_THAT(calls, Not(HasSubstr("?")));
    return units.CheckGradient(0, 2, 2.5);
  }));
}

TEST(RuntimeUnitsTest, GradientsOfOneFlatParameterAreKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    for (int frozen : {0, 2}) {
      Units units(world, Sharded(world));
      if (frozen == 0) units.Train(0, 1, false);
      units.Train(0, frozen, false);
      FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, 1, 2, 3));
      EXPECT_TRUE(units.reducer().HasWholeGradients(0));
      EXPECT_FALSE(units.reducer().HasWholeGradients(1));
      EXPECT_FALSE(units.reducer().HasSums(0));
      units.reducer().DropWholeGradients();
      EXPECT_FALSE(units.reducer().HasWholeGradients(0));
    }
    return absl::OkStatus();
  }));
}

TEST(RuntimeUnitsTest, GradientsOfOneFlatParameterAreReducedWhereNoneCameLast) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    for (int frozen : {0, 1}) units.Train(0, frozen, false);
    FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, 0, 0, 3));
    const Actions reduce = {{kFill, 0}, {kReduce, 0}, {kWaitReduce, 0}};
    FSDP_RETURN_IF_ERROR(units.runtime().Execute(reduce));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 0));
    return units.CheckGradient(0, 2, 3);
  }));
}

TEST(RuntimeUnitsTest, SumsOfOneFlatParameterAreKept) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement placement, Hybrid(world));
    Units units(world, placement);
    units.Train(0, 2, false);
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, ActionKind::kKeepSums}, 0,
                                  mine, 2 * mine, 3));
    EXPECT_TRUE(units.reducer().HasSums(0));
    EXPECT_FALSE(units.reducer().HasSums(1));
    FSDP_RETURN_IF_ERROR(
        units.Do({ActionKind::kReplicateSums, kWaitReduce}, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 2.5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 1, 5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 2, 0));
    return Check(!units.reducer().HasSums(0), "left");
  }));
}

// Reductions are in flight at once. The second sum must not meet the third,
// which would go where the first goes.
TEST(RuntimeUnitsTest, ReductionsOfWhatIsTrainedNowAndThenAddUp) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 1, mine, mine, mine));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 0, mine, mine, mine));
    units.Train(0, 1, false);
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 0, 10 * mine, 10, 0));
    units.Train(0, 1, true);
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce}, 0, 100 * mine, 100 * mine, 0));
    FSDP_RETURN_IF_ERROR(units.Do({kWaitReduce}, 1));
    FSDP_RETURN_IF_ERROR(units.Do({kWaitReduce, kWaitReduce, kWaitReduce}, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 1.5 * 111));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 1, 1.5 * 101));
    return units.CheckGradient(0, 2, 1.5);
  }));
}

TEST(RuntimeUnitsTest, AStepSeesItsUnitsGradientsAloneAndItsErrorIsReturned) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    absl::Status result;
    absl::Status seen = absl::UnknownError("not called");
    RuntimeHooks hooks;
    hooks.step = [&](int) {
      seen = units.CheckGradient(1, 1, 0);
      if (seen.ok()) seen = units.CheckGradient(1, 2, 0);
      if (seen.ok()) seen = units.CheckGradient(0, 0, 4);
      return result;
    };
    units.reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce, kStep}, 0, 4));
    FSDP_RETURN_IF_ERROR(seen);
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 0, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 1, 2));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 2, 3));
    result = absl::DataLossError("nan");
    const absl::Status failed = units.Do({kStep}, 0);
    return Check(absl::IsDataLoss(failed), failed.ToString());
  }));
}

TEST(RuntimeUnitsTest, AStepThatThrowsShowsOthersGradientsUntilAllIsDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    RuntimeHooks hooks;
    hooks.step = [](int) -> absl::Status {
      throw std::runtime_error("out of steps");
    };
    units.reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3));
    EXPECT_THAT(units.Do({kFill, kReduce, kWaitReduce, kStep}, 0, 4),
                StatusIs(absl::StatusCode::kUnknown,
                         AllOf(HasSubstr("the step of unit first"),
                               HasSubstr("out of steps"))));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 1, 2));
    units.runtime().DropEverything();
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 4));
    return units.CheckGradient(1, 1, 0);
  }));
}

// Nothing can be added to the gradient of b.
TEST(RuntimeUnitsTest, WhatHasFailedHalfWayIsNotAddedAgain) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    const at::Tensor a = units.Slice(0, 0), b = units.Slice(0, 1);
    a.mutable_grad() = at::zeros(a.sizes());
    b.mutable_grad() = at::zeros({b.numel() + 1});
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 0, 7, 8, 9));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce}, 1, 7, 8, 9));
    const absl::Status failed = units.Do({kWaitReduce}, 0);
    EXPECT_FALSE(failed.ok());
    const at::Tensor before = a.grad().clone();
    units.reducer().FinishReductions([](int) { return true; });
    EXPECT_TRUE(at::equal(a.grad(), before));
    units.runtime().DropEverything();
    return units.CheckNothingInUse();
  }));
}

TEST(RuntimeUnitsTest, ReductionsInFlightAreFinishedEachInItsWay) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    const double mine = world.rank() + 1;
    Units sharded(world, Sharded(world));
    for (int unit : {0, 1}) {
      FSDP_RETURN_IF_ERROR(
          sharded.Do({kFill, kReduce}, unit, mine, 2 * mine, 3 * mine));
    }
    sharded.runtime().reducer().FinishReductions([](int) { return false; });
    for (int unit : {0, 1}) {
      FSDP_RETURN_IF_ERROR(sharded.CheckGradient(unit, 1, 5));
      FSDP_RETURN_IF_ERROR(sharded.CheckGradient(unit, 2, 7.5));
    }
    FSDP_ASSIGN_OR_RETURN(const Placement placement, Hybrid(world));
    Units replicated(world, placement);
    for (int unit : {0, 1}) {
      FSDP_RETURN_IF_ERROR(
          replicated.Do({kFill, kReduce}, unit, mine, 2 * mine, 3 * mine));
    }
    replicated.runtime().reducer().FinishReductions(
        [](int unit) { return unit == 0; });
    FSDP_RETURN_IF_ERROR(replicated.CheckGradient(0, 1, 5));
    EXPECT_FALSE(replicated.runtime().reducer().HasSums(0));
    FSDP_RETURN_IF_ERROR(replicated.CheckGradient(1, 1, 0));
    return Check(replicated.runtime().reducer().HasSums(1), "sums are gone");
  }));
}

TEST(RuntimeUnitsTest, WhatIsFrozenSinceItWasKeptWholeIsNotReduced) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, mine, mine, mine));
    units.Train(0, 2, false);
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce}, 0, 10, 20, 30));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 11.5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 1, 21.5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 2, 0));
    return units.CheckNothingInUse();
  }));
}

TEST(RuntimeUnitsTest, AnotherScalingIsThatOfAllFlatParameters) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    units.reducer().SetScaling({1, 1});
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce}, 1, world.rank() + 1, 2, 3));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 0, 3));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 1, 4));
    return units.CheckGradient(1, 2, 6);
  }));
}

// The flat parameter before it, in its unit, has no gradient.
TEST(RuntimeUnitsTest, UnusedGradientsOfAnyFlatParameterAreDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    for (int frozen : {0, 1}) units.Train(1, frozen, false);
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 0, 3));
    units.Slice(1, 2).mutable_grad().reset();
    units.reducer().DropUnusedGradients();
    for (const at::Tensor& memory : units.reducer().StepMemory()) {
      EXPECT_NE(memory.scalar_type(), at::kDouble) << "of parameter c";
    }
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
