#include "fsdp/runtime/runtime.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include "absl/synchronization/notification.h"
#include "comm/wrappers/forwarding_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::fsdp::flat_param::FlatParameter;

constexpr absl::Duration kTimeout = absl::Seconds(20);

at::Tensor Values(int unit, at::ScalarType dtype) {
  return at::arange(11, dtype).view({11}) + 100 * unit;
}

// Two units; the second has a parameter of another dtype as well.
struct Fixture {
  explicit Fixture(Communicator& communicator) {
    std::vector<RuntimeUnit> units;
    for (const char* name : {"first", "second"}) {
      units.push_back(EmptyUnit(name, {Unowned(communicator), {}, {}}));
    }
    Add(units[0], 0, at::kFloat, communicator);
    Add(units[1], 1, at::kFloat, communicator);
    Add(units[1], 1, at::kDouble, communicator);
    runtime = std::make_unique<Runtime>(Unowned(communicator), std::move(units),
                                        kTimeout);
  }

  void Add(RuntimeUnit& unit, int index, at::ScalarType dtype,
           Communicator& communicator) {
    tensors.push_back(Values(index, dtype).set_requires_grad(true));
    AddFlat({{"p", {tensors.back()}}}, dtype, communicator, unit);
  }

  std::unique_ptr<Runtime> runtime;
  std::vector<at::Tensor> tensors;
};

TEST(RuntimeTest, GathersEveryDtypeAndFrees) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& communicator) -> absl::Status {
    Fixture f(communicator);
    const Actions gather = {{ActionKind::kGather, 1},
                            {ActionKind::kGather, 0},
                            {ActionKind::kWaitGather, 1}};
    FSDP_RETURN_IF_ERROR(f.runtime->Execute(gather));
    FSDP_RETURN_IF_ERROR(
        CheckTensor(f.tensors[1], Values(1, at::kFloat), "gathered floats"));
    FSDP_RETURN_IF_ERROR(
        CheckTensor(f.tensors[2], Values(1, at::kDouble), "gathered doubles"));
    EXPECT_FALSE(f.runtime->flats(0)[0]->filled());
    const Actions free = {{ActionKind::kFree, 1},
                          {ActionKind::kWaitGather, 0},
                          {ActionKind::kFree, 0}};
    FSDP_RETURN_IF_ERROR(f.runtime->Execute(free));
    EXPECT_EQ(f.runtime->memory_stats().parameters.in_use_bytes, 0);
    return CheckThat(f.runtime->flats(1)[0]->filled(), Eq(false),
                     "whether unit 1 is filled");
  }));
}

TEST(RuntimeTest, ReducesToTheMeanWithSeveralReductionsInFlight) {
  EXPECT_OK(RunAllRanks(3, [](Communicator& communicator) -> absl::Status {
    Fixture f(communicator);
    const double mine = communicator.rank() + 1;
    for (int unit : {1, 0}) {
      std::vector<at::Tensor> gradients;
      for (size_t i = unit; i < (unit == 0 ? 1u : 3u); ++i) {
        gradients.push_back(at::full_like(f.tensors[i].detach(), mine,
                                          f.tensors[i].scalar_type()));
      }
      const Actions reduce = {{ActionKind::kFillReduceBuffer, unit},
                              {ActionKind::kReduce, unit}};
      FSDP_RETURN_IF_ERROR(f.runtime->Execute(reduce, gradients));
    }
    const Actions wait = {{ActionKind::kWaitReduce, 1},
                          {ActionKind::kWaitReduce, 0}};
    FSDP_RETURN_IF_ERROR(f.runtime->Execute(wait));
    for (int unit : {0, 1}) {
      for (const auto& flat : f.runtime->flats(unit)) {
        const at::Tensor gradient = flat->ShardSlice(0).grad();
        FSDP_RETURN_IF_ERROR(CheckTensor(gradient, at::full_like(gradient, 2),
                                         "mean of 1, 2, 3"));
      }
    }
    EXPECT_EQ(f.runtime->memory_stats().gradients.in_use_bytes, 0);
    return absl::OkStatus();
  }));
}

at::Tensor GradientOf(int rank, int backward) {
  return at::arange(11, at::kFloat) * (rank + 2) + 100 * backward + 7 * rank;
}

// The peer reaches the first reduction after this rank has filled the buffer of
// the second one and has written to the gradients of the first.
TEST(RuntimeTest, ASecondBackwardLeavesWhatTheFirstOneReducesAlone) {
  absl::Notification both_started;
  EXPECT_OK(RunAllRanks(2, [&](Communicator& communicator) -> absl::Status {
    Fixture f(communicator);
    const int rank = communicator.rank();
    if (rank == 1 && !both_started.WaitForNotificationWithTimeout(kTimeout)) {
      return absl::DeadlineExceededError("rank 0 waits for its first one");
    }
    at::Tensor expected = at::zeros({11});
    for (int backward : {0, 1}) {
      at::Tensor gradient = GradientOf(rank, backward);
      const Actions reduce = {{ActionKind::kFillReduceBuffer, 0},
                              {ActionKind::kReduce, 0}};
      FSDP_RETURN_IF_ERROR(f.runtime->Execute(reduce, {gradient}));
      gradient.fill_(-1);
      expected += (GradientOf(0, backward) + GradientOf(1, backward)) / 2;
    }
    if (rank == 0) both_started.Notify();
    const Actions wait = {{ActionKind::kWaitReduce, 0},
                          {ActionKind::kWaitReduce, 0}};
    FSDP_RETURN_IF_ERROR(f.runtime->Execute(wait));
    const FlatParameter& flat = *f.runtime->flats(0)[0];
    const flat_param::Slice own = flat.layout().InParameter(0, rank);
    return CheckTensor(flat.ShardSlice(0).grad(),
                       expected.narrow(0, own.begin, own.numel()),
                       "sum of both backwards");
  }));
}

// One rank never comes: the wait ends at its deadline with the unit and the
// rank, and everything can be dropped.
TEST(RuntimeTest, AMissingRankIsADeadlineErrorThatNamesTheUnit) {
  comm::LocalGroupOptions options;
  options.timeout = absl::Milliseconds(50);
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(2, options));
  std::unique_ptr<Fixture> f = std::make_unique<Fixture>(*group[0]);
  std::vector<RuntimeUnit> units;
  units.push_back(EmptyUnit("blocks.7", {Unowned(*group[0]), {}, {}}));
  f->Add(units[0], 0, at::kFloat, *group[0]);
  Runtime runtime(Unowned(*group[0]), std::move(units), options.timeout);
  const Actions gather = {{ActionKind::kGather, 0},
                          {ActionKind::kWaitGather, 0}};
  EXPECT_THAT(
      runtime.Execute(gather),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               ::testing::AllOf(HasSubstr("blocks.7"), HasSubstr("all-gather"),
                                HasSubstr("rank 1"))));
  runtime.DropEverything();
  EXPECT_EQ(runtime.memory_stats().parameters.in_use_bytes, 0);
}

void Add(const char* name, c10::ScalarType stored, c10::ScalarType computed,
         const comm::Communicator& world, RuntimeUnit& unit) {
  AddFlat({{name, {at::zeros({4}, stored)}}}, computed, world, unit);
}

TEST(RuntimeCommonTest, LabelsTellTheFlatParametersOfAUnitApart) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(1));
  const std::shared_ptr<comm::Communicator> world = std::move(group[0]);
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

constexpr int64_t kNumel = 11;

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
  return UnitOf(at::arange(kNumel, at::kFloat).set_requires_grad(true),
                std::move(placement), world);
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
  const std::vector<at::Tensor> gradients = {at::ones({kNumel})};
  return runtime.Execute(actions, gradients);
}

absl::Status Expect(const std::vector<Group>& groups,
                    const std::vector<int>& counts) {
  for (size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(groups[i]->allocations, counts[i]) << i;
  }
  return absl::OkStatus();
}

// The groups of all ranks, of this rank's shards and of its replicas.
struct Groups {
  Group world, row, column;
};

absl::StatusOr<Groups> GroupsOf(Communicator& communicator) {
  FSDP_ASSIGN_OR_RETURN(
      const Mesh mesh,
      Mesh::Create(Unowned(communicator), {{"replicate", 2}, {"shard", 2}}));
  return Groups{Count(mesh.world()), Count(mesh.group(1)),
                Count(mesh.group(0))};
}

TEST(RuntimeMemoryTest, IsThatOfTheGroupThatGathersAndReduces) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Groups groups, GroupsOf(communicator));
    std::vector<RuntimeUnit> units;
    units.push_back(UnitOn(communicator, {groups.row, groups.column, {}}));
    FSDP_RETURN_IF_ERROR(Use(groups.world, std::move(units)));
    return Expect({groups.world, groups.row, groups.column}, {0, 2, 0});
  }));
}

TEST(RuntimeMemoryTest, IsThatOfTheReplicasWhereNothingIsSharded) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Groups groups, GroupsOf(communicator));
    FSDP_ASSIGN_OR_RETURN(auto alone,
                          comm::SplitConsecutive(Unowned(communicator), 1));
    const Group own = Count(std::move(alone));
    std::vector<RuntimeUnit> units;
    units.push_back(UnitOn(communicator, {own, groups.column, {}}));
    FSDP_RETURN_IF_ERROR(Use(groups.world, std::move(units)));
    return Expect({groups.world, own, groups.column}, {0, 0, 1});
  }));
}

// Buffers move between units.
TEST(RuntimeMemoryTest, IsThatOfAllRanksWhereUnitsLieOnSeveralGroups) {
  EXPECT_OK(RunAllRanks(4, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(const Groups groups, GroupsOf(communicator));
    const Group all = Count(Unowned(communicator));
    std::vector<RuntimeUnit> units;
    units.push_back(UnitOn(communicator, {groups.row, groups.column, {}}));
    units.push_back(UnitOn(communicator, {all, {}, {}}));
    FSDP_RETURN_IF_ERROR(Use(groups.world, std::move(units)));
    return Expect({groups.row, groups.column, all}, {0, 0, 0});
  }));
}

}  // namespace
}  // namespace fsdp::testing
