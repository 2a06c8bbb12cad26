// Programs that consist of RunReplicas(): this one, started again with a role.
#include "replicas/launcher/run_replicas.h"

#include <signal.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "comm/agreement.h"

namespace fsdp::replicas {
namespace {

using comm::Communicator;
using comm::Connect;
using comm::Environment;
using comm::kUsageErrorExitCode;
using comm::Sum;

using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::RunThisProgram;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kRole[] = "RUN_REPLICAS_TEST_ROLE";

void PrintSum(const std::string& what, const Environment& self, double sum) {
  std::cout << absl::StrCat("incarnation ", self.replica_incarnation, ": ",
                            what, " ", sum, "\n")
            << std::flush;
}

// The same ranks of all replicas are a column.
absl::Status AddUp(Communicator& ranks, const Environment& self) {
  FSDP_ASSIGN_OR_RETURN(const double sum, Sum(ranks, ranks.rank() + 1));
  PrintSum("the ranks have", self, sum);
  if (self.replicas == 0) return absl::OkStatus();
  Environment place = self;
  place.rank = self.replica;
  place.world_size = self.replicas;
  place.master_addr = self.keeper_addr;
  place.master_port = self.keeper_port;
  place.kept_store = true;
  place.kept_store_prefix = absl::StrCat("column/", self.rank);
  FSDP_ASSIGN_OR_RETURN(const auto column, Connect(place));
  FSDP_ASSIGN_OR_RETURN(const double all, Sum(*column, sum));
  PrintSum("the column has", self, all);
  return absl::OkStatus();
}

absl::Status PlayRank(const std::string& role, Communicator& ranks,
                      const Environment& self) {
  if (role == "fail" && self.replica == 1) {
    return absl::NotFoundError("there is no such file");
  }
  if (role == "place") {
    std::cout << absl::StrCat("replica ", self.replica, " of ", self.replicas,
                              ", incarnation ", self.replica_incarnation, "\n");
  }
  if (role != "sum") return absl::OkStatus();
  return AddUp(ranks, self);
}

// `before`: further variables.
ProgramOutcome Execute(const std::string& role,
                       const std::string& before = "") {
  return RunThisProgram(absl::StrCat(before, " ", kRole, "=", role));
}

TEST(RunReplicasTest, ReplicasAreGroupsAndSoAreTheirColumns) {
  const ProgramOutcome outcome = Execute("sum");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (const char* rank : {"[0.0]", "[0.1]", "[1.0]", "[1.1]"}) {
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr(absl::StrCat(
                          rank, " incarnation 1: the ranks have 3\n")),
                      HasSubstr(absl::StrCat(
                          rank, " incarnation 1: the column has 6\n"))));
  }
}

TEST(RunReplicasTest, WithoutReplicasItIsAJobOfRanks) {
  const ProgramOutcome outcome = Execute("sum", "RUN_REPLICAS_TEST_REPLICAS=0");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("[0] incarnation 0: the ranks have 3\n"),
                    HasSubstr("[1] incarnation 0: the ranks have 3\n")));
}

TEST(RunReplicasTest, SaysWhatBecameOfAReplicaThatWasGivenUp) {
  const ProgramOutcome outcome = Execute("fail");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(outcome.output,
              AllOf(HasSubstr("NOT_FOUND: there is no such file"),
                    HasSubstr("\nreplica 0 exited with code 0; replica 1 "
                              "exited with code 1\n")));
}

// As on one of several hosts; the place of the keeper is not looked for here.
TEST(RunReplicasTest, AProcessThatIsAReplicaStartsNoOther) {
  constexpr char kReplica[] =
      "FSDP_REPLICA=1 FSDP_REPLICAS=2 FSDP_REPLICA_INCARNATION=3 "
      "FSDP_REPLICA_STORE=127.0.0.1:1";
  for (const char* replicas : {"0", "2"}) {
    const ProgramOutcome outcome = Execute(
        "place",
        absl::StrCat(kReplica, " RUN_REPLICAS_TEST_REPLICAS=", replicas));
    EXPECT_EQ(outcome.code, 0) << outcome.output;
    EXPECT_THAT(outcome.output,
                AllOf(HasSubstr("[1.0] replica 1 of 2, incarnation 3\n"),
                      HasSubstr("[1.1] replica 1 of 2, incarnation 3\n"),
                      ::testing::Not(HasSubstr("replica 0"))));
  }
  const ProgramOutcome outcome =
      Execute("place", absl::StrCat(kReplica, " RUN_REPLICAS_TEST_REPLICAS=3"));
  EXPECT_EQ(outcome.code, kUsageErrorExitCode);
  EXPECT_THAT(outcome.output,
              HasSubstr("3 replicas are asked for, but this process was "
                        "started as a part of 2 (FSDP_REPLICAS)"));
}

TEST(RunReplicasTest, RefusesWhatCannotBe) {
  ProgramOutcome outcome = Execute("sum", "RUN_REPLICAS_TEST_REPLICAS=-1");
  EXPECT_EQ(outcome.code, kUsageErrorExitCode);
  EXPECT_THAT(outcome.output, HasSubstr("cannot start -1 replicas"));
  outcome = Execute("sum", "RUN_REPLICAS_TEST_RANKS=0");
  EXPECT_EQ(outcome.code, kUsageErrorExitCode);
  EXPECT_THAT(outcome.output, HasSubstr("cannot start 0 ranks"));
  outcome = Execute(
      "sum", "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500");
  EXPECT_EQ(outcome.code, kUsageErrorExitCode);
  EXPECT_THAT(outcome.output,
              HasSubstr("2 replicas are asked for, but this process was "
                        "started as a part of a job without replicas, by "
                        "torchrun"));
}

TEST(RunReplicasTest, AQuestionThatComesTooLateEndsNobody) {
  const ProgramOutcome outcome = Execute("raise_at_the_end");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

int Number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

}  // namespace

int RunTestRole(int argc, char** argv, const std::string& role) {
  ReplicaCounts counts;
  counts.replicas = Number("RUN_REPLICAS_TEST_REPLICAS", 2);
  counts.ranks = Number("RUN_REPLICAS_TEST_RANKS", 2);
  const bool is_rank = std::getenv("RANK") != nullptr;
  const int code = RunReplicas(
      argc, argv, counts,
      [&](const std::shared_ptr<Communicator>& ranks, const Environment& self) {
        return PlayRank(role, *ranks, self);
      });
  if (role == "raise_at_the_end" && !is_rank) {
    raise(SIGQUIT);
    raise(SIGUSR1);
  }
  return code;
}

}  // namespace fsdp::replicas

int main(int argc, char** argv) {
  if (const char* role = std::getenv("RUN_REPLICAS_TEST_ROLE")) {
    return fsdp::replicas::RunTestRole(argc, argv, role);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
