// Sharding a model that fails at any of its points, on all ranks or on one.

#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/fault_cases.h"
#include "fsdp/tests/errors/fault_checks.h"

namespace fsdp::faults {
namespace {

class FaultInShardingTest : public ::testing::TestWithParam<Case> {};

// They try again with the same modules, unless some units are sharded already,
// and with a new group, because the first may be aborted.
TEST_P(FaultInShardingTest, RanksThatFailAlikeMayTryAgain) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group first(c.world, /*aborts=*/false);
    std::vector<std::shared_ptr<Net>> nets(c.world);
    ASSERT_OK(first.Run([&](Communicator& world) -> absl::Status {
      FaultInjector* injector = first.injector(world.rank());
      std::shared_ptr<Net>& net = nets[world.rank()];
      net = std::make_shared<Net>(injector, c.net);
      injector->Arm(point, FaultType::kStatus);
      absl::Status status = MakeTrainer(c, net, world, injector).status();
      injector->Disarm();
      if (injector->failed_at().empty()) return status;
      return CheckReported({status, std::nullopt}, *injector,
                           FaultType::kStatus, /*keeps_type=*/false);
    }));
    SCOPED_TRACE(
        absl::StrCat("point ", point, ", ", first.injector(0)->failed_at()));
    goes_on = first.has_failed();
    if (!goes_on) continue;
    Group second(c.world, /*aborts=*/false);
    ASSERT_OK(second.Run([&](Communicator& world) -> absl::Status {
      FaultInjector never;
      absl::StatusOr<Trainer> trainer =
          MakeTrainer(c, nets[world.rank()], world, &never);
      if (absl::IsFailedPrecondition(trainer.status()) &&
          absl::StrContains(trainer.status().message(), "make a new one")) {
        trainer = MakeTrainer(c, world, &never);
      }
      FSDP_RETURN_IF_ERROR(trainer.status());
      FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
      FSDP_RETURN_IF_ERROR(Iterate(c, *trainer, 0).status);
      FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
      return CheckSame(*trainer, reference);
    }));
  }
}

TEST_P(FaultInShardingTest, ARankThatFailsAloneEndsItsPeers) {
  const Case& c = GetParam();
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    const int faulty = static_cast<int>(point) % c.world;
    Group group(c.world, /*aborts=*/true);
    EndOfAll end(c.world);
    std::vector<absl::Status> statuses(c.world);
    EXPECT_OK(group.Run([&](Communicator& world) -> absl::Status {
      const int rank = world.rank();
      FaultInjector* injector = group.injector(rank);
      if (rank == faulty) injector->Arm(point, FaultType::kStatus);
      const absl::StatusOr<Trainer> trainer = MakeTrainer(c, world, injector);
      statuses[rank] = trainer.status();
      injector->Disarm();
      return end.Reach();
    }));
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    goes_on = !failed_at.empty();
    for (const absl::Status& status : statuses) {
      EXPECT_OK(CheckNamed(status, faulty));
    }
    EXPECT_NE(statuses[faulty].ok(), goes_on);
  }
}

std::vector<Case> ShardingCases() {
  std::vector<Case> cases;
  for (Case& c : Cases()) {
    if (c.name == "FullShard" || c.name == "BackwardGroups" ||
        c.name == "HybridShard") {
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, FaultInShardingTest,
                         ::testing::ValuesIn(ShardingCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::faults
