// Training that fails on one rank, at any of its points: its peers end with an
// error that names it. A parameter is never half written.

#include "fsdp/testing/fault_injector.h"
#include "fsdp/testing/sharded_test.h"
#include "fsdp/tests/errors/fault_cases.h"
#include "fsdp/tests/errors/fault_checks.h"

namespace fsdp::faults {
namespace {

// Returns whether the point is in user code that the model does not see.
bool ConcernsOneRank(const std::string& point) { return point == "a scope"; }

// The outcomes of two iterations on each rank.
struct Outcomes {
  absl::Status first;
  absl::Status second;
};

absl::Status FailOnOneRank(const Case& c, Communicator& world,
                           FaultInjector* injector,
                           const std::function<void()>& arm, int faulty,
                           FaultType type, EndOfAll* end, Outcomes* outcomes) {
  FaultInjector never;
  FSDP_ASSIGN_OR_RETURN(Trainer trainer, MakeTrainer(c, world, injector));
  FSDP_ASSIGN_OR_RETURN(Trainer reference, MakeTrainer(c, world, &never));
  const Values before = ShardsOf(trainer);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 0).status);
  const Values once = ShardsOf(reference);
  FSDP_RETURN_IF_ERROR(Iterate(c, reference, 1).status);
  const Values twice = ShardsOf(reference);

  arm();
  const Outcome outcome = Iterate(c, trainer, 0);
  injector->Disarm();
  outcomes->first = outcome.status;
  if (!outcome.status.ok()) {
    const bool fails_here = !injector->failed_at().empty();
    if (fails_here) {
      FSDP_RETURN_IF_ERROR(
          CheckReported(outcome, *injector, type, /*keeps_type=*/false));
    }
    trainer.model->zero_grad();
    if (fails_here && c.frees_at_failure) {
      FSDP_RETURN_IF_ERROR(CheckNothingGathered(trainer));
    }
    FSDP_RETURN_IF_ERROR(
        CheckNotTorn(trainer, {before, c.edits ? once : before}));
  }
  outcomes->second = Iterate(c, trainer, 1).status;
  FSDP_RETURN_IF_ERROR(end->Reach());
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->first, faulty));
  FSDP_RETURN_IF_ERROR(CheckNamed(outcomes->second, faulty));
  return outcomes->second.ok() ? absl::OkStatus()
                               : CheckNotTorn(trainer, {before, once, twice});
}

void ExpectAllRanksEnd(const Case& c, FaultType type, absl::string_view part) {
  bool goes_on = true;
  for (int64_t point = 0; goes_on; ++point) {
    Group group(c.world, /*aborts=*/c.outside_iteration);
    EndOfAll end(c.world);
    std::vector<Outcomes> outcomes(c.world);
    const int faulty = static_cast<int>(point) % c.world;
    const absl::Status status = group.Run([&](Communicator& world) {
      const int rank = world.rank();
      const auto arm = [&, rank] {
        if (rank == faulty) group.injector(rank)->Arm(point, type, part);
      };
      return FailOnOneRank(c, world, group.injector(rank), arm, faulty, type,
                           &end, &outcomes[rank]);
    });
    const std::string& failed_at = group.injector(faulty)->failed_at();
    SCOPED_TRACE(absl::StrCat("point ", point, ", ", failed_at));
    ASSERT_OK(status);
    goes_on = !failed_at.empty();
    if (!goes_on) continue;
    EXPECT_FALSE(outcomes[faulty].first.ok());
    for (const Outcomes& of_rank : outcomes) {
      // Either all ranks go on, or none.
      EXPECT_EQ(of_rank.second.ok(), outcomes[faulty].second.ok());
      if (ConcernsOneRank(failed_at)) {
        EXPECT_OK(of_rank.second);
      } else {
        EXPECT_FALSE(of_rank.first.ok() && of_rank.second.ok());
      }
    }
  }
}

class OneRankFaultTest : public ::testing::TestWithParam<Case> {};

TEST_P(OneRankFaultTest, ARankThatFailsAloneEndsItsPeersWithItsName) {
  const Case& c = GetParam();
  for (const FaultType type : {FaultType::kStatus, FaultType::kUsers}) {
    SCOPED_TRACE(type);
    if (!c.outside_iteration) {
      ExpectAllRanksEnd(c, type, /*part=*/"");
      continue;
    }
    // Agreements between steps use the group of all ranks: the others do not
    // learn of a failure on one rank alone.
    ExpectAllRanksEnd(c, type, /*part=*/" of first");
    Case one_group = c;
    one_group.replicas = 1;
    one_group.options.unit.strategy = ShardingStrategy::kFullShard;
    ExpectAllRanksEnd(one_group, type, /*part=*/"");
  }
}

std::vector<Case> CasesThatTellPeers() {
  std::vector<Case> cases = Cases();
  cases.erase(std::remove_if(cases.begin(), cases.end(),
                             [](const Case& c) { return !c.tells_peers; }),
              cases.end());
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, OneRankFaultTest,
                         ::testing::ValuesIn(CasesThatTellPeers()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::faults
