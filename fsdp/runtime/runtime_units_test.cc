// Units with several parameters and flat parameters, of which an action
// concerns only some.
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include "comm/agreement.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::NamedParameter;

constexpr int64_t kNumel = 6;

// Two units, each with two parameters in float and one in double, which has a
// flat parameter of its own.
class Units {
 public:
  // Parameter c is computed in `dtype_of_c`.
  Units(Communicator& world, const Placement& placement,
        at::ScalarType dtype_of_c = at::kDouble) {
    std::vector<RuntimeUnit> units;
    for (const std::string name : {"first", "second"}) {
      RuntimeUnit& unit = units.emplace_back(EmptyUnit(name, placement));
      Add({"a", "b"}, at::kFloat, at::kFloat, world, unit);
      Add({"c"}, at::kDouble, dtype_of_c, world, unit);
    }
    runtime_ = std::make_unique<Runtime>(Unowned(world), std::move(units),
                                         absl::Seconds(20));
  }

  Runtime& runtime() { return *runtime_; }
  at::Tensor Slice(int unit, int i) const {
    const auto& flats = runtime_->flats(unit);
    return i < 2 ? flats[0]->ShardSlice(i) : flats[1]->ShardSlice(0);
  }
  const at::Tensor& parameter(int unit, int i) const {
    return tensors_[3 * unit + i];
  }
  void Train(int unit, int i, bool trained) const {
    Slice(unit, i).set_requires_grad(trained);
  }

  // Executes actions with gradients of these values; 0 means none.
  absl::Status Do(const std::vector<ActionKind>& kinds, int unit, double a = 0,
                  double b = 0, double c = 0) {
    Actions actions;
    for (const ActionKind kind : kinds) actions.push_back({kind, unit});
    std::vector<at::Tensor> gradients;
    for (double value : {a, b, c}) {
      const auto dtype = gradients.size() < 2 ? at::kFloat : at::kDouble;
      gradients.push_back(value == 0 ? at::Tensor()
                                     : at::full({kNumel}, value, dtype));
    }
    return runtime_->Execute(actions, gradients);
  }

  // Checks the gradient; 0 means that there is none.
  absl::Status CheckGradient(int unit, int i, double expected) const {
    const at::Tensor gradient = Slice(unit, i).grad();
    if (!gradient.defined() || expected == 0) {
      return Check(!gradient.defined() && expected == 0,
                   absl::StrCat("gradient ", i, " is there or is not"));
    }
    return Check(at::equal(gradient, at::full_like(gradient, expected)),
                 absl::StrCat("gradient ", i, " is not ", expected));
  }

 private:
  void Add(const std::vector<std::string>& names, at::ScalarType dtype,
           at::ScalarType compute_dtype, Communicator& world,
           RuntimeUnit& unit) {
    std::vector<NamedParameter> parameters;
    for (const std::string& name : names) {
      tensors_.push_back(at::zeros({kNumel}, dtype).requires_grad_());
      parameters.push_back({name, {tensors_.back()}});
    }
    AddFlat(std::move(parameters), compute_dtype, world, unit);
  }

  std::vector<at::Tensor> tensors_;  // unit after unit
  std::unique_ptr<Runtime> runtime_;
};

Placement Sharded(Communicator& world) { return {Unowned(world), {}, {}}; }

constexpr auto kFill = ActionKind::kFillReduceBuffer;
constexpr auto kReduce = ActionKind::kReduce;
constexpr auto kWaitReduce = ActionKind::kWaitReduce;
constexpr auto kAccumulate = ActionKind::kAccumulate;

TEST(RuntimeUnitsTest, GradientsOfOneFlatParameterAreKeptWhole) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    for (int frozen : {0, 2}) {
      Units units(world, Sharded(world));
      if (frozen == 0) units.Train(0, 1, false);
      units.Train(0, frozen, false);
      FSDP_RETURN_IF_ERROR(units.Do({kAccumulate}, 0, 1, 2, 3));
      EXPECT_TRUE(units.runtime().reducer().HasWholeGradients(0));
      EXPECT_FALSE(units.runtime().reducer().HasWholeGradients(1));
      EXPECT_FALSE(units.runtime().reducer().HasSums(0));
      units.runtime().reducer().DropWholeGradients();
      EXPECT_FALSE(units.runtime().reducer().HasWholeGradients(0));
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
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    Units units(world, {mesh.group(1), mesh.group(0), nullptr});
    units.Train(0, 2, false);
    const double mine = world.rank() + 1;
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, ActionKind::kKeepSums}, 0,
                                  mine, 2 * mine, 3));
    EXPECT_TRUE(units.runtime().reducer().HasSums(0));
    EXPECT_FALSE(units.runtime().reducer().HasSums(1));
    FSDP_RETURN_IF_ERROR(
        units.Do({ActionKind::kReplicateSums, kWaitReduce}, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 0, 2.5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 1, 5));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(0, 2, 0));
    return Check(!units.runtime().reducer().HasSums(0), "left");
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

TEST(RuntimeUnitsTest, AStepSeesNoGradientOfUnitsThatAreNotSteppedYet) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    absl::Status seen = absl::UnknownError("not called");
    RuntimeHooks hooks;
    hooks.step = [&](int) {
      seen = units.CheckGradient(1, 1, 0);
      if (seen.ok()) seen = units.CheckGradient(1, 2, 0);
      if (seen.ok()) seen = units.CheckGradient(0, 0, 4);
      return absl::OkStatus();
    };
    units.runtime().reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3));
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce, ActionKind::kStep}, 0, 4));
    FSDP_RETURN_IF_ERROR(seen);
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 0, 0));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 1, 2));
    return units.CheckGradient(1, 2, 3);
  }));
}

TEST(RuntimeUnitsTest, AStepThatThrowsShowsOthersGradientsUntilAllIsDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    RuntimeHooks hooks;
    hooks.step = [](int) -> absl::Status {
      throw std::runtime_error("out of steps");
    };
    units.runtime().reducer().SetHooks(std::move(hooks));
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 2, 3));
    EXPECT_THAT(
        units.Do({kFill, kReduce, kWaitReduce, ActionKind::kStep}, 0, 4),
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
    units.runtime().reducer().FinishReductions([](int) { return true; });
    EXPECT_TRUE(at::equal(a.grad(), before));
    units.runtime().DropEverything();
    return Check(units.runtime().memory_stats().gradients.in_use_bytes == 0,
                 "memory is in use");
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
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    Units replicated(world, {mesh.group(1), mesh.group(0), nullptr});
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
    return Check(units.runtime().memory_stats().gradients.in_use_bytes == 0,
                 "memory is in use");
  }));
}

TEST(RuntimeUnitsTest, AnotherScalingIsThatOfAllFlatParameters) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    units.runtime().reducer().SetScaling({1, 1});
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce}, 1, world.rank() + 1, 2, 3));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 0, 3));
    FSDP_RETURN_IF_ERROR(units.CheckGradient(1, 1, 4));
    return units.CheckGradient(1, 2, 6);
  }));
}

constexpr auto kGather = ActionKind::kGather;
constexpr auto kWaitGather = ActionKind::kWaitGather;

TEST(RuntimeUnitsTest, PartsOfAllFlatParametersAreDroppedWithEverything) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    Placement placement = Sharded(world);
    FSDP_ASSIGN_OR_RETURN(placement.part,
                          comm::SplitConsecutive(placement.shard, 2));
    Units units(world, placement);
    FSDP_RETURN_IF_ERROR(
        units.Do({kGather, kWaitGather, ActionKind::kShrink}, 0));
    units.runtime().DropEverything();
    for (const auto& flat : units.runtime().flats(0)) {
      at::Tensor shard = flat->shard();
      shard.fill_(5);
    }
    FSDP_RETURN_IF_ERROR(units.Do({kGather, kWaitGather}, 0));
    for (int i : {0, 1, 2}) {
      const at::Tensor parameter = units.parameter(0, i).detach();
      EXPECT_TRUE(at::equal(parameter, at::full_like(parameter, 5)));
    }
    return units.Do({ActionKind::kFree}, 0);
  }));
}

TEST(RuntimeUnitsTest, AUnitHoldsACopyWhereOneFlatParameterIsCast) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Communicator> alone,
                          comm::SplitConsecutive(Unowned(world), 1));
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      Units units(world, {alone, Unowned(world), nullptr}, dtype);
      FSDP_RETURN_IF_ERROR(units.Do({kGather, kWaitGather}, 0));
      EXPECT_EQ(units.runtime().gatherer().HoldsCopy(0), dtype == at::kFloat);
      FSDP_RETURN_IF_ERROR(units.Do({ActionKind::kFree}, 0));
    }
    return absl::OkStatus();
  }));
}

// The flat parameter before it, in its unit, has no gradient.
TEST(RuntimeUnitsTest, UnusedGradientsOfAnyFlatParameterAreDropped) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    for (int frozen : {0, 1}) units.Train(1, frozen, false);
    FSDP_RETURN_IF_ERROR(units.Do({kFill, kReduce, kWaitReduce}, 1, 0, 0, 3));
    units.Slice(1, 2).mutable_grad().reset();
    Reducer& reducer = units.runtime().reducer();
    reducer.DropUnusedGradients();
    for (const at::Tensor& memory : reducer.StepMemory()) {
      EXPECT_NE(memory.scalar_type(), at::kDouble) << "of parameter c";
    }
    return absl::OkStatus();
  }));
}

TEST(RuntimeUnitsTest, AbortEndsTheGroupsOfAllUnits) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        const Mesh mesh,
        Mesh::Create(Unowned(world), {{"replicate", 2}, {"shard", 2}}));
    Placement placement = {mesh.group(1), mesh.group(0), nullptr};
    FSDP_ASSIGN_OR_RETURN(placement.part,
                          comm::SplitConsecutive(placement.shard, 2));
    Units units(world, placement);
    units.runtime().Abort(absl::DataLossError("the loss is NaN"));
    for (Communicator* const group :
         {&world, placement.shard.get(), placement.replicate.get(),
          placement.part.get()}) {
      EXPECT_THAT(comm::Agree(*group, absl::OkStatus(), "going on",
                              absl::Now() + absl::Seconds(20)),
                  StatusIs(absl::StatusCode::kAborted,
                           ::testing::HasSubstr("the loss is NaN")));
    }
    return absl::OkStatus();
  }));
}

// What is gathered and reduced is logged where it lies, and rank 1 has to read
// whether rank 0 has a gradient.
TEST(RuntimeUnitsTest, TheStepLogSaysWhereThingsLieAndWhoReadsFlags) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Units units(world, Sharded(world));
    StepLog log;
    units.runtime().SetStepLog(&log);
    const bool is_second = world.rank() == 1;
    FSDP_RETURN_IF_ERROR(units.Do({kGather, kWaitGather}, 1));
    FSDP_RETURN_IF_ERROR(
        units.Do({kFill, kReduce, kWaitReduce}, 1, is_second ? 0 : 1, 2, 3));
    units.runtime().SetStepLog(nullptr);
    FSDP_RETURN_IF_ERROR(units.Do({ActionKind::kFree}, 1));
    EXPECT_EQ(log.size(), 5);
    for (const StepRecord& record : log) {
      EXPECT_THAT(record.gathered,
                  ::testing::AllOf(::testing::SizeIs(2),
                                   ::testing::Each(::testing::NotNull())));
    }
    EXPECT_THAT(log[2].reduced,
                ::testing::AllOf(::testing::SizeIs(2),
                                 ::testing::Each(::testing::NotNull())));
    EXPECT_THAT(log[4].reduced, ::testing::IsEmpty());
    EXPECT_FALSE(log[2].read_flags);
    EXPECT_EQ(log[4].read_flags, is_second);
    return absl::OkStatus();
  }));
}

}  // namespace
}  // namespace fsdp::testing
