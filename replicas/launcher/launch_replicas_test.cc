// Runs this program as launcher and as the ranks of replicas.
#include "replicas/launcher/launch_replicas.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "comm/launcher/child_process.h"
#include "comm/launcher/launcher.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "replicas/testing/launch_replicas_roles.h"

namespace fsdp::replicas {
namespace {

using comm::ChildProcess;
using comm::kLimit;
using comm::LaunchOptions;
using comm::LaunchRanks;
using comm::LaunchReport;
using comm::Listen;
using comm::Listener;
using comm::ProcessEnd;
using comm::RanksLeft;
using comm::ReadAll;
using comm::StoreServer;

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Launched {
  ReplicasReport report;
  std::string output;
};

absl::StatusOr<Launched> Launch(int replicas, LaunchOptions options) {
  const UniqueFd output(memfd_create("output", MFD_CLOEXEC));
  options.stdout_fd = options.stderr_fd = output.get();
  FSDP_ASSIGN_OR_RETURN(ReplicasReport report,
                        LaunchReplicas(replicas, options));
  EXPECT_TRUE(waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD);
  return Launched{std::move(report), ReadAll(output.get())};
}

LaunchOptions Restarted(const std::string& role, int max_restarts) {
  LaunchOptions options = TwoRanks(role);
  options.restarts.max_restarts = max_restarts;
  return options;
}

std::set<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

TEST(LaunchReplicasTest, RanksKnowTheirReplicaAndLinesSayIt) {
  for (const auto& [replicas, ranks] :
       {std::pair(1, 1), std::pair(1, 2), std::pair(3, 1), std::pair(2, 3)}) {
    LaunchOptions options = TwoRanks("print_place");
    options.ranks = ranks;
    ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(replicas, options));
    EXPECT_EQ(launched.report.exit_code(), 0) << launched.report.ToString();
    EXPECT_EQ(launched.report.replicas.size(), replicas);
    std::set<std::string> expected;
    for (int replica = 0; replica < replicas; ++replica) {
      for (int rank = 0; rank < ranks; ++rank) {
        expected.insert(absl::StrCat(
            "[", replica, ".", rank, "] replica ", replica, " of ", replicas,
            ", incarnation 1, rank ", rank, " of ", ranks, ", local ", rank,
            " of ", ranks, ", store 127.0.0.1"));
      }
    }
    EXPECT_EQ(Lines(launched.output), expected);
  }
}

TEST(LaunchReplicasTest, AllHaveOneSecret) {
  std::set<std::string> secrets;
  for (int job = 0; job < 2; ++job) {
    ASSERT_OK_AND_ASSIGN(const Launched launched,
                         Launch(2, TwoRanks("print_secret")));
    std::set<std::string> of_job;
    for (const std::string& line : Lines(launched.output)) {
      of_job.insert(line.substr(std::string("[0.0] ").size()));
    }
    ASSERT_EQ(of_job.size(), 1);
    EXPECT_EQ(of_job.begin()->size(), 64);
    secrets.insert(*of_job.begin());
  }
  EXPECT_EQ(secrets.size(), 2);
  LaunchOptions options = TwoRanks("print_secret");
  options.environment.emplace_back("FSDP_JOB_SECRET", "ours");
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(1, options));
  EXPECT_EQ(Lines(launched.output),
            (std::set<std::string>{"[0.0] ours", "[0.1] ours"}));
}

TEST(LaunchReplicasTest, CoresAreDividedByAllRanks) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  LaunchOptions options = TwoRanks("print_cores");
  options.ranks = 1;
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(2, options));
  EXPECT_THAT(launched.output,
              HasSubstr(absl::StrCat("[1.0] ", std::max(1, cores / 2), "\n")));
  options.environment.emplace_back("OMP_NUM_THREADS", "7");
  ASSERT_OK_AND_ASSIGN(const Launched chosen, Launch(2, options));
  EXPECT_THAT(chosen.output, HasSubstr("[1.0] 7\n"));
}

TEST(LaunchReplicasTest, ADeathInOneIsNothingToTheOthers) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(3, Restarted("kill_once", 1)));
  EXPECT_EQ(launched.report.exit_code(), 0) << launched.output;
  EXPECT_EQ(launched.report.last_failed_replica, -1) << launched.output;
  EXPECT_THAT(
      launched.output,
      AllOf(HasSubstr("[1.1] replica 1 of 3, incarnation 1, rank 1 of 2"),
            HasSubstr("replica 1: rank 1 was killed by signal 9 (SIGKILL); "
                      "then rank 0 was ended by the launcher with signal 15 "
                      "(SIGTERM)\nreplica 1: restart 1 of 1, with 2 ranks, in "
                      "1ms\n"),
            HasSubstr("[1.1] replica 1 of 3, incarnation 2, rank 1 of 2"),
            HasSubstr("[1.0] replica 1 of 3, incarnation 2, rank 0 of 2"),
            HasSubstr("replica 1: attempt 2 (2 ranks, "),
            Not(HasSubstr("replica 0 of 3, incarnation 2")),
            Not(HasSubstr("replica 0: "))));
}

TEST(LaunchReplicasTest, TheKeeperIsToldBeforeAllRanksHaveEnded) {
  LaunchOptions options = TwoRanks("end_slowly");
  options.grace_period = kLimit;
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(2, options));
  EXPECT_EQ(launched.report.exit_code(), 0) << launched.output;
  EXPECT_EQ(launched.report.replicas[1].exit_code, 3) << launched.output;
  EXPECT_THAT(launched.output, HasSubstr("replica 1: rank 1 exited with code "
                                         "3; then rank 0 exited with code 4"));
}

TEST(LaunchReplicasTest, OneThatIsGivenUpIsNoFailureWhileOthersComeToTheEnd) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(2, Restarted("replica_1_exits_with_3", 2)));
  EXPECT_EQ(launched.report.exit_code(), 0) << launched.output;
  EXPECT_EQ(launched.report.last_failed_replica, 1);
  EXPECT_EQ(launched.report.ToString(),
            "replica 0 exited with code 0; replica 1 exited with code 3");
  EXPECT_THAT(launched.output,
              AllOf(HasSubstr("replica 1: attempt 3 (2 ranks, "),
                    HasSubstr("replica 1: not restarted: it was restarted 2 "
                              "times, as often as it may be")));
}

TEST(LaunchReplicasTest, WhereAllFailTheLastOneIsTheAnswer) {
  ASSERT_OK_AND_ASSIGN(const Launched launched,
                       Launch(2, TwoRanks("all_fail")));
  EXPECT_EQ(launched.report.exit_code(), 4) << launched.output;
}

TEST(LaunchReplicasTest, RefusesBadOptions) {
  EXPECT_DEATH((void)Launch(0, TwoRanks("print_place")), "replicas > 0");
  LaunchOptions options = TwoRanks("print_place");
  options.ranks = 0;
  EXPECT_THAT(Launch(2, options), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("ranks is 0")));
  options = Restarted("print_place", 1);
  options.restarts.on_restart = RanksLeft;
  EXPECT_THAT(Launch(2, options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("restarts.on_restart is set")));
}

TEST(LaunchReplicasTest, ReplicasThatCannotStartSaySo) {
  LaunchOptions options = TwoRanks("print_place");
  options.program = "/no/such/program";
  ASSERT_OK_AND_ASSIGN(const Launched launched, Launch(2, options));
  EXPECT_EQ(launched.report.exit_code(), EXIT_FAILURE);
  EXPECT_THAT(launched.output,
              AllOf(HasSubstr("replica 1: FAILED_PRECONDITION: starting rank 0 "
                              "of 2: cannot run /no/such/program")));
}

// A keeper as `tools/keeper` is one, and a replica that was started by itself.
class LoneReplicaTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::string> LaunchWith(const std::string& secret) {
    FSDP_ASSIGN_OR_RETURN(Listener listener, Listen("127.0.0.1", 0));
    FSDP_ASSIGN_OR_RETURN(const ChildProcess keeper, ChildProcess::Fork([&] {
                            const auto server = StoreServer::Start(
                                std::move(listener.fd), "ours");
                            for (;;) pause();
                            return 0;
                          }));
    LaunchOptions options = Restarted("fail_once", 1);
    options.environment.insert(
        options.environment.end(),
        {{"FSDP_REPLICA", "2"},
         {"FSDP_REPLICAS", "3"},
         {"FSDP_REPLICA_INCARNATION", "7"},
         {"FSDP_REPLICA_STORE", absl::StrCat("127.0.0.1:", listener.port)},
         {"FSDP_JOB_SECRET", secret}});
    const UniqueFd output(memfd_create("output", MFD_CLOEXEC));
    options.stdout_fd = options.stderr_fd = output.get();
    FSDP_ASSIGN_OR_RETURN(const LaunchReport report, LaunchRanks(options));
    return absl::StrCat(ReadAll(output.get()), report.ToString());
  }
};

TEST_F(LoneReplicaTest, EachAttemptIsAnIncarnationAndTheKeeperIsTold) {
  ASSERT_OK_AND_ASSIGN(const std::string output, LaunchWith("ours"));
  EXPECT_THAT(
      output,
      AllOf(HasSubstr("[2.0] replica 2 of 3, incarnation 7, rank 0 of 2"),
            HasSubstr("[2.0] replica 2 of 3, incarnation 8, rank 0 of 2"),
            HasSubstr("ranks 0, 1 exited with code 0"),
            Not(HasSubstr("telling the keeper"))));
}

TEST_F(LoneReplicaTest, SaysWhereTheKeeperCannotBeTold) {
  ASSERT_OK_AND_ASSIGN(const std::string output, LaunchWith("theirs"));
  EXPECT_THAT(output,
              HasSubstr("replica 2: telling the keeper that incarnation 7 has "
                        "ended: the job's store at 127.0.0.1:"));
}

TEST_F(LoneReplicaTest, WithoutASecretNoneIsDrawn) {
  LaunchOptions options = TwoRanks("print_secret");
  options.environment.insert(options.environment.end(),
                             {{"FSDP_REPLICA", "0"},
                              {"FSDP_REPLICAS", "1"},
                              {"FSDP_REPLICA_INCARNATION", "1"},
                              {"FSDP_REPLICA_STORE", "127.0.0.1:1"}});
  const UniqueFd output(memfd_create("output", MFD_CLOEXEC));
  options.stdout_fd = output.get();
  ASSERT_OK(LaunchRanks(options));
  EXPECT_EQ(Lines(ReadAll(output.get())),
            (std::set<std::string>{"[0.0] ", "[0.1] "}));
}

TEST_F(LoneReplicaTest, SaysWhatIsWrongWithItsVariables) {
  LaunchOptions options = TwoRanks("print_place");
  options.environment.emplace_back("FSDP_REPLICA", "1");
  EXPECT_THAT(LaunchRanks(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("FSDP_REPLICAS is not set")));
}

TEST(ReplicasReportTest, ExitCodes) {
  struct Case {
    std::vector<ProcessEnd> replicas;
    int last_failed;
    int code;
    int interrupt_signal = 0;
    int output_errno = 0;
    bool keeper_was_lost = false;
  };
  const Case cases[] = {
      // One that has come to the end is enough.
      {{{0, 0}, {0, 0}}, -1, 0},
      {{{137, 0}, {0, 0}, {0, SIGKILL}}, 2, 0},
      // Otherwise the last one counts.
      {{{137, 0}, {3, 0}}, 0, 137},
      {{{137, 0}, {3, 0}}, 1, 3},
      {{{137, 0}, {0, SIGKILL}}, 1, 128 + SIGKILL},
      // What concerns the whole job comes first.
      {{{0, 0}, {3, 0}}, 1, 1, 0, ENOSPC},
      {{{0, 0}, {3, 0}}, 1, 1, 0, 0, true},
      {{{143, 0}, {143, 0}}, 1, 143, SIGTERM, 0, true},
      // Whoever was told to end may be done, or fail.
      {{{0, 0}, {143, 0}}, 1, 0, SIGTERM},
      {{{1, 0}, {143, 0}}, 1, 143, SIGTERM},
      {{{143, 0}, {1, 0}}, 1, 1, SIGTERM},
      {{{1, 0}, {0, SIGKILL}}, 1, 143, SIGTERM},
      {{{3, 0}, {1, 0}}, 1, 1, SIGTERM},
  };
  for (const Case& c : cases) {
    const ReplicasReport report{c.replicas, c.last_failed, c.interrupt_signal,
                                c.output_errno, c.keeper_was_lost};
    EXPECT_EQ(report.exit_code(), c.code) << report.ToString();
  }
}

TEST(ReplicasReportTest, SaysWhatBecameOfEach) {
  ReplicasReport report;
  report.replicas = {{0, 0}, {3, 0}, {0, 0}, {0, SIGKILL}};
  EXPECT_EQ(report.ToString(),
            "replicas 0, 2 exited with code 0; replica 1 exited with code 3; "
            "replica 3 killed by signal 9 (SIGKILL)");
  report.interrupt_signal = SIGINT;
  report.keeper_was_lost = true;
  report.output_errno = ENOSPC;
  EXPECT_EQ(report.ToString(),
            "interrupted by signal 2 (SIGINT); the keeper of the replicas had "
            "ended; replicas 0, 2 exited with code 0; replica 1 exited with "
            "code 3; replica 3 killed by signal 9 (SIGKILL); what they printed "
            "could not be written: No space left on device");
}

}  // namespace
}  // namespace fsdp::replicas

int main(int argc, char** argv) {
  if (const auto code = fsdp::replicas::PlayReplicaRole(); code.has_value()) {
    return *code;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
