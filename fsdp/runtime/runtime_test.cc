// What a Runtime gathers, in which memory, in which order, and what it says.
#include "fsdp/runtime/runtime.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "absl/synchronization/notification.h"
#include "comm/agreement.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/runtime/testing/units.h"

namespace fsdp::testing {
namespace {

TEST(RuntimeTest, GathersEveryDtypeAndFrees) {
  OnRanks(3, Sharded, [](Units& units) {
    units.Do({kGather}, 1);
    units.Do({kGather}, 0);
    units.Do({kWaitGather}, 1);
    for (int i : {0, 1, 2}) {
      EXPECT_TRUE(at::equal(units.parameter(1, i), Units::Values(1, i)));
    }
    EXPECT_FALSE(units.flat(0, 0).filled());
    units.Do({kFree}, 1);
    units.Do({kWaitGather, kFree}, 0);
    EXPECT_FALSE(units.flat(1, 0).filled());
    units.ExpectNothingInUse();
  });
}

TEST(RuntimeTest, ReducesToTheMeanWithSeveralReductionsInFlight) {
  OnRanks(3, Sharded, [](Units& units) {
    const double mine = units.rank() + 1;
    for (int unit : {1, 0}) {
      units.Do({kFill, kReduce}, unit, mine, 2 * mine, 3 * mine);
    }
    for (int unit : {1, 0}) {
      units.Do({kWaitReduce}, unit);
      for (int i : {0, 1, 2}) {
        units.ExpectGradient(unit, i, 2 * (i + 1));
      }
    }
    units.ExpectNothingInUse();
  });
}

at::Tensor GradientOf(int rank, int backward) {
  return at::arange(11, at::kFloat) * (rank + 2) + 100 * backward + 7 * rank;
}

// The peer reaches the first reduction after this rank has filled the buffer of
// the second one and has written to the gradients of the first.
TEST(RuntimeTest, ASecondBackwardLeavesWhatTheFirstOneReducesAlone) {
  absl::Notification both_started;
  OnRanks(2, Sharded, [&](Units& units) {
    const int rank = units.rank();
    if (rank == 1) {
      ASSERT_TRUE(both_started.WaitForNotificationWithTimeout(Units::kTimeout))
          << "rank 0 waits for its first one";
    }
    at::Tensor expected = at::zeros({11});
    for (int backward : {0, 1}) {
      at::Tensor gradient = GradientOf(rank, backward);
      EXPECT_OK(units.DoWith({kFill, kReduce}, 0, {gradient, {}, {}}));
      gradient.fill_(-1);
      expected += (GradientOf(0, backward) + GradientOf(1, backward)) / 2;
    }
    if (rank == 0) both_started.Notify();
    units.Do({kWaitReduce, kWaitReduce}, 0);
    const flat_param::Slice own =
        units.flat(0, 0).layout().InParameter(0, rank);
    EXPECT_TRUE(at::equal(units.Slice(0, 0).grad(),
                          expected.narrow(0, own.begin, own.numel())));
  });
}

// One rank never comes: the wait ends at its deadline with the unit and the
// rank, and everything can be dropped.
TEST(RuntimeTest, AMissingRankIsADeadlineErrorThatNamesTheUnit) {
  comm::LocalGroupOptions options;
  options.timeout = absl::Milliseconds(50);
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(2, options));
  Units units(*group[0], Sharded(*group[0]), at::kDouble, options.timeout);
  EXPECT_THAT(units.Try({kGather, kWaitGather}, 1),
              StatusIs(Code::kDeadlineExceeded,
                       AllOf(HasSubstr("second"), HasSubstr("all-gather"),
                             HasSubstr("rank 1"))));
  units.runtime().DropEverything();
  units.ExpectNothingInUse();
}

// As in a capture, whose ranks have to have as many buffers as each other.
TEST(RuntimeTest, MemoryInFlightIsUsedAgainOnlyIfNothingWasSent) {
  for (const bool sent : {false, true}) {
    OnRanks(2, Sharded, [&](Units& units) {
      units.Do({kGather}, 1);
      units.Do({kFill, kReduce}, 0, 7, 8, 9);
      const MemoryStats before = units.runtime().memory_stats();
      units.runtime().DropEverything(sent);
      const MemoryStats now = units.runtime().memory_stats();
      EXPECT_EQ(now.parameters.allocations < before.parameters.allocations,
                sent);
      EXPECT_EQ(now.gradients.allocations < before.gradients.allocations, sent);
      units.ExpectNothingInUse();
    });
  }
}

absl::StatusOr<Placement> InParts(Communicator& world) {
  Placement placement = Sharded(world);
  FSDP_ASSIGN_OR_RETURN(placement.part,
                        comm::SplitConsecutive(placement.shard, 2));
  return placement;
}

TEST(RuntimeTest, ASmallerGroupGathersFromAPartUntilThatIsDropped) {
  OnRanks(4, InParts, [](Units& units) {
    const auto write = [&] {
      for (int i : {0, 2}) {
        at::Tensor shard = units.flat(0, i).shard();
        shard.add_(1);
      }
    };
    const auto expect = [&](double written) {
      units.Do({kGather, kWaitGather}, 0);
      for (int i : {0, 1, 2}) {
        EXPECT_TRUE(
            at::equal(units.parameter(0, i), Units::Values(0, i) + written));
      }
    };
    units.Do({kGather, kWaitGather, kShrink}, 0);
    units.ExpectNothingInUse();
    write();
    expect(0);
    units.Do({kFree, ActionKind::kDropPart}, 0);
    expect(1);
    units.Do({kShrink}, 0);
    units.runtime().DropEverything();
    write();
    expect(2);
    units.Do({kFree}, 0);
  });
}

// In a group of one rank, the shard is the whole parameter.
TEST(RuntimeTest, ComputesInTheShardItselfUnlessTheDtypeDiffers) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Placement placement, NotSharded(world));
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      Units units(world, placement, dtype);
      units.Do({kGather, kWaitGather}, 0);
      EXPECT_EQ(units.parameter(0, 0).data_ptr(),
                units.flat(0, 0).shard().data_ptr());
      EXPECT_EQ(units.parameter(0, 2).scalar_type(), dtype);
      const bool is_cast = dtype == at::kFloat;
      EXPECT_EQ(units.runtime().HoldsCopy(0), is_cast);
      const MemoryStats stats = units.runtime().memory_stats();
      EXPECT_EQ(stats.parameters.in_use_bytes != 0, is_cast);
      units.Do({kFree}, 0);
    }
    return absl::OkStatus();
  }));
}

TEST(RuntimeTest, AbortEndsTheGroupsOfAllUnits) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Placement placement, Hybrid(world));
    FSDP_ASSIGN_OR_RETURN(placement.part,
                          comm::SplitConsecutive(placement.shard, 2));
    Units units(world, placement);
    units.runtime().Abort(absl::DataLossError("the loss is NaN"));
    for (Communicator* const group :
         {&world, placement.shard.get(), placement.replicate.get(),
          placement.part.get()}) {
      EXPECT_THAT(comm::Agree(*group, absl::OkStatus(), "going on",
                              absl::Now() + Units::kTimeout),
                  StatusIs(Code::kAborted, HasSubstr("the loss is NaN")));
    }
    return absl::OkStatus();
  }));
}

// What is gathered and reduced is logged where it lies, and rank 1 has to read
// whether rank 0 has a gradient.
TEST(RuntimeTest, TheStepLogSaysWhereThingsLieAndWhoReadsFlags) {
  OnRanks(2, Sharded, [](Units& units) {
    StepLog log;
    units.runtime().SetStepLog(&log);
    const bool is_second = units.rank() == 1;
    units.Do({kGather, kWaitGather}, 1);
    units.Do({kFill, kReduce, kWaitReduce}, 1, is_second ? 0 : 1, 2, 3);
    units.runtime().SetStepLog(nullptr);
    units.Do({kFree}, 1);
    EXPECT_EQ(log.size(), 5);
    const auto are_two = AllOf(SizeIs(2), Each(::testing::NotNull()));
    for (const StepRecord& record : log) {
      EXPECT_THAT(record.gathered, are_two);
    }
    EXPECT_THAT(log[2].reduced, are_two);
    EXPECT_THAT(log[4].reduced, IsEmpty());
    EXPECT_FALSE(log[2].read_flags);
    EXPECT_EQ(log[4].read_flags, is_second);
  });
}

void Add(const char* name, c10::ScalarType stored, c10::ScalarType computed,
         const Communicator& world, RuntimeUnit& unit) {
  AddFlat({{name, {at::zeros({4}, stored)}}}, computed, world, unit);
}

TEST(RuntimeCommonTest, LabelsTellTheFlatParametersOfAUnitApart) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
  const std::shared_ptr<Communicator> world = std::move(group[0]);
  std::vector<RuntimeUnit> units;
  units.push_back(EmptyUnit("one", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[0]);
  units.push_back(EmptyUnit("several", {world, {}, {}}));
  Add("p", at::kFloat, at::kFloat, *world, units[1]);
  Add("q", at::kFloat, at::kBFloat16, *world, units[1]);
  Add("frozen", at::kFloat, at::kFloat, *world, units[1]);
  const RuntimeCommon common(world, std::move(units), absl::Seconds(20));
  EXPECT_EQ(common.label(0, 0), "one");
  EXPECT_EQ(common.label(1, 0), "several/Float");
  EXPECT_EQ(common.label(1, 1), "several/Float in BFloat16");
  EXPECT_EQ(common.label(1, 2), "several/Float from frozen on");
}

class Counting final : public comm::ForwardingCommunicator {
 public:
  explicit Counting(std::shared_ptr<Communicator> base)
      : ForwardingCommunicator(std::move(base)) {}
  absl::StatusOr<at::Tensor> AllocateSymmetric(int64_t bytes) override {
    ++allocations;
    return base().AllocateSymmetric(bytes);
  }
  int allocations = 0;
};

using Group = std::shared_ptr<Counting>;

Group Count(std::shared_ptr<Communicator> base) {
  return std::make_shared<Counting>(std::move(base));
}

RuntimeUnit UnitOn(const Communicator& world, Placement placement) {
  RuntimeUnit unit = EmptyUnit("unit", std::move(placement));
  AddFlat({{"p", {at::zeros({Units::kNumel}).set_requires_grad(true)}}},
          at::kFloat, world, unit);
  return unit;
}

// Gathers and reduces the units; some are replicated.
absl::Status Use(const Group& world, std::vector<RuntimeUnit> units) {
  Actions actions;
  for (int i = 0; i < static_cast<int>(units.size()); ++i) {
    const bool is_replicated = units[i].placement.replicate != nullptr;
    for (const ActionKind kind :
         {ActionKind::kGather, ActionKind::kWaitGather,
          ActionKind::kFillReduceBuffer, ActionKind::kFree, ActionKind::kReduce,
          ActionKind::kReplicate, ActionKind::kWaitReduce}) {
      if (kind == ActionKind::kReplicate && !is_replicated) continue;
      actions.push_back({kind, i});
    }
  }
  Runtime runtime(world, std::move(units), absl::Seconds(20));
  const std::vector<at::Tensor> gradients = {at::ones({Units::kNumel})};
  return runtime.Execute(actions, gradients);
}

absl::Status Expect(const std::vector<Group>& groups,
                    const std::vector<int>& counts) {
  for (size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(groups[i]->allocations, counts[i]) << i;
    groups[i]->allocations = 0;
  }
  return absl::OkStatus();
}

TEST(RuntimeTest, SymmetricMemoryIsThatOfTheGroupThatGathersAndReduces) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Mesh mesh, MeshOf(communicator));
    FSDP_ASSIGN_OR_RETURN(auto alone,
                          comm::SplitConsecutive(Unowned(communicator), 1));
    const Group world = Count(mesh.world()), row = Count(mesh.group(1)),
                column = Count(mesh.group(0)), own = Count(std::move(alone));
    const auto use = [&](std::vector<Placement> placements) {
      std::vector<RuntimeUnit> units;
      for (Placement& placement : placements) {
        units.push_back(UnitOn(communicator, std::move(placement)));
      }
      return Use(world, std::move(units));
    };
    FSDP_RETURN_IF_ERROR(use({{row, column, {}}}));
    FSDP_RETURN_IF_ERROR(Expect({world, row, column, own}, {0, 2, 0, 0}));
    // Nothing is sharded: the replicas reduce.
    FSDP_RETURN_IF_ERROR(use({{own, column, {}}}));
    FSDP_RETURN_IF_ERROR(Expect({world, row, column, own}, {0, 0, 1, 0}));
    // Buffers move between units on several groups: it is that of all ranks.
    const Group all = Count(Unowned(communicator));
    FSDP_RETURN_IF_ERROR(use({{row, column, {}}, {all, {}, {}}}));
    return Expect({row, column, all}, {0, 0, 0});
  }));
}

}  // namespace
}  // namespace fsdp::testing
