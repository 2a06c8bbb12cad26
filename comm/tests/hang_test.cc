// Tests what a job that hangs says of itself: long waits, the end at the
// deadline, and the answer to a signal. The job is this program, started again
// with a role.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/testing/ranks_of_one_host.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::ChildProcess;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::ProgramPath;
using ::fsdp::testing::RunThisProgram;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr int kVictim = 2;
constexpr absl::Duration kLimit = absl::Seconds(30);
constexpr char kRole[] = "HANG_TEST_ROLE";
constexpr char kBackend[] = "HANG_TEST_BACKEND";

int Rank() { return std::atoi(std::getenv("RANK")); }

ConnectOptions OptionsOf(const std::string& role) {
  ConnectOptions options;
  const char* backend = std::getenv(kBackend);
  if (backend != nullptr) options.backend = ParseBackend(backend).value();
  options.timeout = kLimit;
  options.warn_after = absl::Milliseconds(100);
  if (role == "asked") options.warn_after = absl::ZeroDuration();
  // The rank is known once the launcher has started this process.
  if (role == "busy" && std::getenv("RANK") != nullptr) {
    options.host = Rank() == kVictim ? "one" : "another";
  }
  return options;
}

absl::StatusOr<std::vector<int64_t>> Gather(Communicator& ranks, int64_t own) {
  at::Tensor all = at::zeros({kRanks}, at::kLong);
  at::Tensor in = at::zeros({1}, at::kLong);
  in.fill_(own);
  FSDP_ASSIGN_OR_RETURN(auto work, ranks.AllGather(all, in, "processes"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + kLimit));
  const auto* begin = all.const_data_ptr<int64_t>();
  return std::vector<int64_t>(begin, begin + kRanks);
}

// The victim stops; when rank 1, whose report names it, has ended it may end
// as well.
absl::Status Stop(Communicator& ranks) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<int64_t> processes,
                        Gather(ranks, getpid()));
  if (ranks.rank() == kVictim) raise(SIGSTOP);
  const at::Tensor in = at::zeros({8});
  const at::Tensor out = at::zeros({int64_t{8} * kRanks});
  FSDP_ASSIGN_OR_RETURN(auto work, ranks.AllGather(out, in, "blocks.2"));
  absl::Status status = work->Wait(absl::Now() + absl::Seconds(2));
  if (ranks.rank() == 0) {
    const absl::Time latest = absl::Now() + absl::Seconds(20);
    while (kill(static_cast<pid_t>(processes[1]), 0) == 0 &&
           absl::Now() < latest) {
      poll(nullptr, 0, 10);
    }
    kill(static_cast<pid_t>(processes[kVictim]), SIGCONT);
  }
  return status;
}

// The victim does something else until the others say that they wait.
absl::Status BeBusy(Communicator& ranks) {
  FSDP_RETURN_IF_ERROR(SumRanks(ranks));
  if (ranks.rank() == kVictim) {
    ranks.activity()->Note(Phase::kCheckpoint, "saving", -1);
    poll(nullptr, 0, 1000);
  }
  return SumRanks(ranks);
}

// The victim does nothing until it is killed.
absl::Status BeAsked(Communicator& ranks) {
  FSDP_RETURN_IF_ERROR(SumRanks(ranks));
  ranks.activity()->Note(Phase::kForward, "blocks.7", 5 << 20);
  std::fprintf(stderr, "ready\n");
  while (ranks.rank() == kVictim) pause();
  return SumRanks(ranks);
}

absl::Status RunRole(const std::string& role, Communicator& ranks) {
  if (role == "stop") return Stop(ranks);
  if (role == "busy") return BeBusy(ranks);
  FSDP_CHECK(role == "asked");
  return BeAsked(ranks);
}

class StoppedRankTest : public ::testing::TestWithParam<const char*> {};

TEST_P(StoppedRankTest, IsNamedWhileTheOthersWaitAndWhenTheyGiveUp) {
  const ProgramOutcome outcome =
      RunThisProgram(absl::StrCat(kRole, "=stop ", kBackend, "=", GetParam()));
  EXPECT_NE(outcome.code, 0);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(
        outcome.output,
        ContainsRegex(absl::StrCat(
            "\\[", rank, "\\] fsdp: rank ", rank,
            " has waited [0-9.]+ m?s for all-gather #1 of blocks.2; rank ",
            1 - rank,
            " is in it; rank 2 is behind by 1 call: it has called nothing "
            "since all-gather #0 of processes, [0-9.]+ m?s ago; process "
            "[0-9]+ is stopped")));
  }
  EXPECT_THAT(
      outcome.output,
      AllOf(ContainsRegex("fsdp: rank [01] has failed .*What the ranks were"),
            ContainsRegex("\\] ranks 0, 1 are in it; rank 2 is behind by 1 "
                          "call: it has called nothing since all-gather #0"),
            ContainsRegex("\\]   all-gather #1 of blocks.2, float32, 96 bytes: "
                          "(FAILED after|waiting for)")));
}

INSTANTIATE_TEST_SUITE_P(Backends, StoppedRankTest,
                         ::testing::Values("shared_memory", "gloo"),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

TEST(BusyRankTest, OfAnotherHostIsNamedByWhatItPublishes) {
  const ProgramOutcome outcome =
      RunThisProgram(absl::StrCat(kRole, "=busy ", kBackend, "=gloo"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_THAT(
      outcome.output,
      ContainsRegex(
          "fsdp: rank 0 has waited [0-9.]+ m?s for all-reduce #1 of ranks; "
          "rank 1 is in it; rank 2 is behind by 1 call: it has called nothing "
          "since all-reduce #0 of ranks, [0-9.]+ m?s ago "
          ".checkpoint: saving."));
}

TEST(InspectionSignalTest, ToTheLauncherShowsAllRanks) {
  for (const int number : {SIGQUIT, SIGUSR1}) {
    ChildProcess job(
        absl::StrCat("env ", kRole, "=asked '", ProgramPath(), "'"));
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSERT_NE(job.Await("ready"), "");
    }
    // Ranks 0 and 1 are on their way into the second call.
    std::string waits;
    const absl::Time deadline = absl::Now() + kLimit;
    while (absl::Now() < deadline && !absl::StrContains(waits, "is in")) {
      job.Signal(number);
      waits = job.Await("fsdp: rank 0 (process ");
      ASSERT_NE(waits, "");
    }
    EXPECT_THAT(waits, AllOf(HasSubstr("[0] "),
                             ContainsRegex("[0-9.]+ [KMG]iB resident, "
                                           "[0-9.]+ [KMG]iB at most, 5.0 MiB "
                                           "in pools"),
                             HasSubstr("is in all-reduce #1 of ranks for"),
                             HasSubstr("forward of blocks.7")));
    EXPECT_THAT(job.Await("  all-reduce #0 of ranks"),
                HasSubstr("int64, 40 bytes: done in"));
    job.Signal(number);
    EXPECT_THAT(job.Await("fsdp: rank 2 (process "),
                HasSubstr("has called nothing since all-reduce #0 of ranks"));
    job.Signal(number);
    EXPECT_NE(job.Await("fsdp: rank 1 (process "), "");
  }
}

void Nothing(int /*signal*/) {}

auto HandlerOf(int number) {
  struct sigaction action = {};
  sigaction(number, nullptr, &action);
  return action.sa_handler;
}

TEST(InspectionSignalTest, HandlersOfTheProgramStay) {
  signal(SIGUSR1, Nothing);
  {
    const auto installed = InspectionSignals::Install();
    ASSERT_TRUE(installed.ok());
    EXPECT_EQ(HandlerOf(SIGUSR1), &Nothing);
    EXPECT_NE(HandlerOf(SIGQUIT), SIG_DFL);
    signal(SIGQUIT, Nothing);
  }
  EXPECT_EQ(HandlerOf(SIGQUIT), &Nothing);
  signal(SIGUSR1, SIG_DFL);
  const auto refused = InspectionSignals::Install();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("the program has a handler for SIGQUIT"));
  EXPECT_EQ(HandlerOf(SIGQUIT), &Nothing);
  EXPECT_EQ(HandlerOf(SIGUSR1), SIG_DFL);
  signal(SIGQUIT, SIG_DFL);
}

TEST(InspectionSignalTest, WhatWasIsRestored) {
  signal(SIGQUIT, SIG_IGN);
  {
    const auto installed = InspectionSignals::Install();
    ASSERT_TRUE(installed.ok());
    EXPECT_NE(HandlerOf(SIGQUIT), SIG_IGN);
    EXPECT_NE(HandlerOf(SIGUSR1), SIG_DFL);
    EXPECT_FALSE(InspectionSignals::Install().ok());
  }
  EXPECT_EQ(HandlerOf(SIGQUIT), SIG_IGN);
  EXPECT_EQ(HandlerOf(SIGUSR1), SIG_DFL);
  signal(SIGQUIT, SIG_DFL);
}

}  // namespace

int RunTestRole(int argc, char** argv, const std::string& role) {
  return RunRanks(
      argc, argv, kRanks,
      [&](const std::shared_ptr<Communicator>& ranks) {
        return RunRole(role, *ranks);
      },
      OptionsOf(role));
}

}  // namespace fsdp::comm

int main(int argc, char** argv) {
  if (const char* role = std::getenv("HANG_TEST_ROLE")) {
    return fsdp::comm::RunTestRole(argc, argv, role);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
