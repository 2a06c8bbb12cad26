// What a Runtime makes of the gradients of units with several flat parameters,
// of which an action concerns only some.
#include <ATen/ops/zeros.h>

#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/units.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp::testing {
namespace {

TEST(RuntimeUnitsTest, GradientsKeptWholeOutliveWhatElseIsDropped) {
  OnRanks(2, Sharded, [](Units& units) {
    units.Do({kGather, kWaitGather}, 0);
    units.Do({kAccumulate}, 0, 1, 1, 1);
    units.runtime().DropEverything();
    EXPECT_TRUE(units.reducer().HasWholeGradients(0));
    units.Do({kFill, kReduce, kWaitReduce}, 0, 5, 5, 5);
    units.ExpectGradient(0, 0, 6);
    units.ExpectGradient(0, 2, 6);
    units.ExpectNothingInUse();
  });
}

TEST(RuntimeUnitsTest, TwoReductionsAreReplicatedInTurnShardedOrNot) {
  EXPECT_OK(RunAllRanks(6, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement hybrid, Hybrid(world));
    FSDP_ASSIGN_OR_RETURN(const Placement alone, NotSharded(world));
    const double mine = world.rank() + 1;
    for (const Placement& placement : {hybrid, alone}) {
      Units units(world, placement);
      units.Do({kFill, kReduce}, 0, mine, mine, mine);
      units.Do({kReplicate, kFill, kReduce}, 0, 10, 10, 10);
      units.Do({kWaitReduce, kReplicate, kWaitReduce}, 0);
      for (int i : {0, 1, 2}) {
        units.ExpectGradient(0, i, 13.5);
      }
    }
    return absl::OkStatus();
  }));
}

TEST(RuntimeHooksTest, ReductionsAreCalledWithOwnAsThisRanksPartOfTheWhole) {
  OnRanks(4, Hybrid, [](Units& units) {
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
    units.Do({kFill, kReduce, kReplicate, kWaitReduce}, 0, 0, 0,
             units.rank() + 1);
    EXPECT_THAT(calls, HasSubstr("scatter first"));
    EXPECT_THAT(calls, HasSubstr("reduce first"));
    EXPECT_THAT(calls, Not(HasSubstr("?")));
    units.ExpectGradient(0, 2, 2.5);
  });
}

TEST(RuntimeUnitsTest, GradientsOfOneFlatParameterAreKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    for (int frozen : {0, 2}) {
      Units units(world, Sharded(world));
      if (frozen == 0) units.Train(0, 1, false);
      units.Train(0, frozen, false);
      units.Do({kAccumulate}, 0, 1, 2, 3);
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
  OnRanks(2, Sharded, [](Units& units) {
    for (int frozen : {0, 1}) units.Train(0, frozen, false);
    units.Do({kAccumulate}, 0, 0, 0, 3);
    const Actions reduce = {{kFill, 0}, {kReduce, 0}, {kWaitReduce, 0}};
    EXPECT_OK(units.runtime().Execute(reduce));
    units.ExpectGradient(0, 0, 0);
    units.ExpectGradient(0, 2, 3);
  });
}

TEST(RuntimeUnitsTest, SumsOfOneFlatParameterAreKept) {
  OnRanks(4, Hybrid, [](Units& units) {
    units.Train(0, 2, false);
    const double mine = units.rank() + 1;
    units.Do({kFill, kReduce, ActionKind::kKeepSums}, 0, mine, 2 * mine, 3);
    EXPECT_TRUE(units.reducer().HasSums(0));
    EXPECT_FALSE(units.reducer().HasSums(1));
    units.Do({ActionKind::kReplicateSums, kWaitReduce}, 0);
    units.ExpectGradient(0, 0, 2.5);
    units.ExpectGradient(0, 1, 5);
    units.ExpectGradient(0, 2, 0);
    EXPECT_TRUE(!units.reducer().HasSums(0)) << "left";
  });
}

// Reductions are in flight at once. The second sum must not meet the third,
// which would go where the first goes.
TEST(RuntimeUnitsTest, ReductionsOfWhatIsTrainedNowAndThenAddUp) {
  OnRanks(2, Sharded, [](Units& units) {
    const double mine = units.rank() + 1;
    units.Do({kFill, kReduce}, 1, mine, mine, mine);
    units.Do({kFill, kReduce}, 0, mine, mine, mine);
    units.Train(0, 1, false);
    units.Do({kFill, kReduce}, 0, 10 * mine, 10, 0);
    units.Train(0, 1, true);
    units.Do({kFill, kReduce}, 0, 100 * mine, 100 * mine, 0);
    units.Do({kWaitReduce}, 1);
    units.Do({kWaitReduce, kWaitReduce, kWaitReduce}, 0);
    units.ExpectGradient(0, 0, 1.5 * 111);
    units.ExpectGradient(0, 1, 1.5 * 101);
    units.ExpectGradient(0, 2, 1.5);
  });
}

TEST(RuntimeUnitsTest, AStepSeesItsUnitsGradientsAloneAndItsErrorIsReturned) {
  OnRanks(2, Sharded, [](Units& units) {
    absl::Status result;
    int calls = 0;
    RuntimeHooks hooks;
    hooks.step = [&](int) {
      ++calls;
      units.ExpectGradient(1, 1, 0);
      units.ExpectGradient(1, 2, 0);
      units.ExpectGradient(0, 0, 4);
      return result;
    };
    units.reducer().SetHooks(std::move(hooks));
    units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3);
    units.Do({kFill, kReduce, kWaitReduce, kStep}, 0, 4);
    EXPECT_EQ(calls, 1);
    units.ExpectGradient(1, 0, 0);
    units.ExpectGradient(1, 1, 2);
    units.ExpectGradient(1, 2, 3);
    result = absl::DataLossError("nan");
    const absl::Status failed = units.Try({kStep}, 0);
    EXPECT_TRUE(absl::IsDataLoss(failed)) << failed.ToString();
  });
}

TEST(RuntimeUnitsTest, AStepThatThrowsShowsOthersGradientsUntilAllIsDropped) {
  OnRanks(2, Sharded, [](Units& units) {
    RuntimeHooks hooks;
    hooks.step = [](int) -> absl::Status {
      throw std::runtime_error("out of steps");
    };
    units.reducer().SetHooks(std::move(hooks));
    units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3);
    EXPECT_THAT(
        units.Try({kFill, kReduce, kWaitReduce, kStep}, 0, 4),
        StatusIs(Code::kUnknown, AllOf(HasSubstr("the step of unit first"),
                                       HasSubstr("out of steps"))));
    units.ExpectGradient(1, 1, 2);
    units.runtime().DropEverything();
    units.ExpectGradient(0, 0, 4);
    units.ExpectGradient(1, 1, 0);
  });
}

// Nothing can be added to the gradient of b.
TEST(RuntimeUnitsTest, WhatHasFailedHalfWayIsNotAddedAgain) {
  OnRanks(2, Sharded, [](Units& units) {
    const at::Tensor a = units.Slice(0, 0), b = units.Slice(0, 1);
    a.mutable_grad() = at::zeros(a.sizes());
    b.mutable_grad() = at::zeros({b.numel() + 1});
    units.Do({kFill, kReduce}, 0, 7, 8, 9);
    units.Do({kFill, kReduce}, 1, 7, 8, 9);
    EXPECT_FALSE(units.Try({kWaitReduce}, 0).ok());
    const at::Tensor before = a.grad().clone();
    units.reducer().FinishReductions([](int) { return true; });
    EXPECT_TRUE(at::equal(a.grad(), before));
    units.runtime().DropEverything();
    units.ExpectNothingInUse();
  });
}

TEST(RuntimeUnitsTest, ReductionsInFlightAreFinishedEachInItsWay) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    const double mine = world.rank() + 1;
    Units sharded(world, Sharded(world));
    for (int unit : {0, 1}) {
      sharded.Do({kFill, kReduce}, unit, mine, 2 * mine, 3 * mine);
    }
    sharded.runtime().reducer().FinishReductions([](int) { return false; });
    for (int unit : {0, 1}) {
      sharded.ExpectGradient(unit, 1, 5);
      sharded.ExpectGradient(unit, 2, 7.5);
    }
    FSDP_ASSIGN_OR_RETURN(const Placement placement, Hybrid(world));
    Units replicated(world, placement);
    for (int unit : {0, 1}) {
      replicated.Do({kFill, kReduce}, unit, mine, 2 * mine, 3 * mine);
    }
    replicated.runtime().reducer().FinishReductions(
        [](int unit) { return unit == 0; });
    replicated.ExpectGradient(0, 1, 5);
    EXPECT_FALSE(replicated.runtime().reducer().HasSums(0));
    replicated.ExpectGradient(1, 1, 0);
    return Check(replicated.runtime().reducer().HasSums(1), "sums are gone");
  }));
}

TEST(RuntimeUnitsTest, WhatIsFrozenSinceItWasKeptWholeIsNotReduced) {
  OnRanks(2, Sharded, [](Units& units) {
    const double mine = units.rank() + 1;
    units.Do({kAccumulate}, 0, mine, mine, mine);
    units.Train(0, 2, false);
    units.Do({kFill, kReduce, kWaitReduce}, 0, 10, 20, 30);
    units.ExpectGradient(0, 0, 11.5);
    units.ExpectGradient(0, 1, 21.5);
    units.ExpectGradient(0, 2, 0);
    units.ExpectNothingInUse();
  });
}

TEST(RuntimeUnitsTest, AnotherScalingIsThatOfAllFlatParameters) {
  OnRanks(2, Sharded, [](Units& units) {
    units.reducer().SetScaling({1, 1});
    units.Do({kFill, kReduce, kWaitReduce}, 1, units.rank() + 1, 2, 3);
    units.ExpectGradient(1, 0, 3);
    units.ExpectGradient(1, 1, 4);
    units.ExpectGradient(1, 2, 6);
  });
}

// The flat parameter before it, in its unit, has no gradient.
TEST(RuntimeUnitsTest, UnusedGradientsOfAnyFlatParameterAreDropped) {
  OnRanks(2, Sharded, [](Units& units) {
    for (int frozen : {0, 1}) units.Train(1, frozen, false);
    units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 0, 3);
    units.Slice(1, 2).mutable_grad().reset();
    units.reducer().DropUnusedGradients();
    for (const at::Tensor& memory : units.reducer().StepMemory()) {
      EXPECT_NE(memory.scalar_type(), at::kDouble) << "of parameter c";
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
