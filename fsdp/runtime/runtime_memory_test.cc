// The group that allocates the memory of its collectives.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include "comm/wrappers/forwarding_communicator.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/testing/runtime_unit.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

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
    if (groups[i]->allocations != counts[i]) {
      return absl::InternalError(
          absl::StrCat("group ", i, " allocates ", groups[i]->allocations));
    }
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
