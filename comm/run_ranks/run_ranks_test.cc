// Tests programs that consist of RunRanks(): this one, started again with a
// role.
#include "comm/run_ranks/run_ranks.h"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "base/testing/this_program.h"
#include "comm/agreement.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/ranks_of_one_host.h"
#include "comm/testing/staged/staged_communicator.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::ProgramOutcome;
using ::fsdp::testing::RunThisProgram;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kRole[] = "RUN_RANKS_TEST_ROLE";

int Number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value == nullptr ? otherwise : std::atoi(value);
}

// Rank 0 sends the signal to the process of RUN_RANKS_TEST_VICTIM: itself or
// the launcher. All ranks stop once one has it, or return OK as those whose
// work was whole.
absl::Status StopAfterSignal(Communicator& ranks) {
  if (ranks.rank() == 0) {
    const pid_t victim =
        Number("RUN_RANKS_TEST_TO_PARENT", 0) != 0 ? getppid() : getpid();
    kill(victim, Number("RUN_RANKS_TEST_SIGNAL", SIGTERM));
    const int second = Number("RUN_RANKS_TEST_SECOND", 0);
    if (second != 0) kill(victim, second);
  }
  const absl::Time deadline = absl::Now() + absl::Minutes(1);
  while (absl::Now() < deadline) {
    const int mine = StopRequest::Current()->signal();
    FSDP_ASSIGN_OR_RETURN(const double signal, Max(ranks, mine));
    if (signal == 0) continue;
    return Number("RUN_RANKS_TEST_RETURNS_OK", 0) != 0
               ? absl::OkStatus()
               : StoppedError(static_cast<int>(signal), "after step 7");
  }
  return absl::DeadlineExceededError("no signal has come");
}

// A forward on one rank waits a second for the others to have read common
// memory, while another rank is in a mean.
absl::Status CallWhatOthersDoNot(Communicator& ranks) {
  FSDP_ASSIGN_OR_RETURN(const CommonMemory common, ranks.AllocateCommon(64));
  if (ranks.rank() == 1) return Mean(ranks, 1).status();
  common.fence->Arrive();
  return common.fence->Wait(absl::Now() + absl::Seconds(1));
}

// Whether the system says that the launcher of this process ignores it.
bool LauncherIgnores(int signal) {
  std::ifstream status(absl::StrCat("/proc/", getppid(), "/status"));
  for (std::string name, mask; status >> name;) {
    if (name != "SigIgn:") continue;
    status >> mask;
    return (std::stoull(mask, nullptr, 16) >> (signal - 1) & 1) != 0;
  }
  return false;
}

// Plays a rank's role. No restarted rank fails.
absl::Status RunRole(const std::string& role, Communicator& ranks) {
  const int restart = Number("TORCHELASTIC_RESTART_COUNT", 0);
  FSDP_ASSIGN_OR_RETURN(const double sum, Sum(ranks, ranks.rank() + 1));
  std::cout << absl::StrCat("rank ", ranks.rank(), " of ", ranks.world_size(),
                            " has ", sum, "\n")
            << std::flush;
  const int failing = role == "fail_alone" ? 0 : 1;
  if (role == "agree") {
    return Agree(ranks,
                 ranks.rank() == 2 ? absl::InternalError("no such layer")
                                   : absl::OkStatus(),
                 "looking", absl::Now() + ranks.default_timeout());
  }
  if (role == "agree_on_a_file") {
    return Agree(ranks, absl::NotFoundError("there is no such file"), "reading",
                 absl::Now() + ranks.default_timeout());
  }
  if (role == "finish_early") {
    if (ranks.rank() == 1) return absl::OkStatus();
    return Sum(ranks, 1).status();
  }
  if (role == "differ") return CallWhatOthersDoNot(ranks);
  if (role == "ask") {
    return LauncherIgnores(SIGQUIT) && LauncherIgnores(SIGUSR1)
               ? absl::OkStatus()
               : absl::InternalError("a question would end the launcher");
  }
  if (role == "kill" && ranks.rank() == 1) raise(SIGKILL);
  if (role == "stop") return StopAfterSignal(ranks);
  if (role == "fail_stopped") {
    return absl::IsCancelled(StopAfterSignal(ranks))
               ? absl::ResourceExhaustedError("the disk is full")
               : absl::OkStatus();
  }
  if (role == "sum" || restart > 0 || ranks.rank() != failing) {
    return Sum(ranks, 1).status();
  }
  if (role == "throw") throw std::runtime_error("the file is empty");
  return absl::NotFoundError("there is no such file");
}

// `before` has further variables.
ProgramOutcome Execute(const std::string& role,
                       const std::string& before = "") {
  return RunThisProgram(absl::StrCat(before, " ", kRole, "=", role));
}

// The program ends with `code` and prints what `output` matches.
void ExpectEnd(const std::string& role, const std::string& before, int code,
               const ::testing::Matcher<std::string>& output = ::testing::_) {
  const ProgramOutcome outcome = Execute(role, before);
  EXPECT_EQ(outcome.code, code) << outcome.output;
  EXPECT_THAT(outcome.output, output);
}

TEST(RunRanksTest, StartsAsManyAsItIsTold) {
  const ProgramOutcome outcome = Execute("sum");
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(outcome.output, HasSubstr(absl::StrCat("[", rank, "] rank ",
                                                       rank, " of 3 has 6\n")));
  }
}

TEST(RunRanksTest, AnErrorOfOneRankEndsAllWithItsText) {
  ExpectEnd("fail", "", EXIT_FAILURE,
            AllOf(HasSubstr("[1] NOT_FOUND: there is no such file"),
                  HasSubstr("rank 1 aborted: there is no such file")));
}

// Survivors end by themselves.
TEST(RunRanksTest, ARankThatIsKilledEndsAll) {
  ExpectEnd("kill", "", 128 + SIGKILL,
            AllOf(HasSubstr("rank 1 was killed by signal 9 (SIGKILL); then "),
                  Not(HasSubstr("by the launcher"))));
}

TEST(RunRanksTest, SoDoesWhatItThrows) {
  ExpectEnd("throw", "", EXIT_FAILURE,
            AllOf(HasSubstr("[1] UNKNOWN: an exception: the file is empty"),
                  HasSubstr("rank 1 aborted: an exception: the file is")));
}

TEST(RunRanksTest, WhatAllRanksAgreeOnIsPrintedOnce) {
  ExpectEnd("agree", "", EXIT_FAILURE,
            AllOf(HasSubstr("[0] INTERNAL: rank 2: no such layer\n"),
                  Not(ContainsRegex("\\[[12]\\] INTERNAL"))));
}

// An error that one rank alone has met is retried: another one may not meet it.
TEST(RunRanksTest, WhatAllRanksWouldMeetAgainIsNotRetried) {
  ExpectEnd("agree_on_a_file", "RUN_RANKS_TEST_RESTARTS=5", kUsageErrorExitCode,
            HasSubstr("not restarted: exit code 2"));
}

TEST(RunRanksTest, OutputThatIsLostIsAFailure) {
  for (const int ranks : {1, 2}) {
    const ProgramOutcome outcome = fsdp::testing::RunCommand(
        absl::StrCat("(", kRole, "=sum RUN_RANKS_TEST_RANKS=", ranks, " '",
                     fsdp::testing::ProgramPath(), "' > /dev/full)"));
    EXPECT_EQ(outcome.code, EXIT_FAILURE) << outcome.output;
    EXPECT_THAT(outcome.output, AnyOf(HasSubstr("not all could be printed"),
                                      HasSubstr("could not be written")));
  }
}

// A rank that is told to stop before it has connected, or has a handler, leaves
// with the others.
TEST(RunRanksTest, ARankThatIsToldToStopWhileItConnectsTellsTheOthers) {
  ExpectEnd("told_early", "", 128 + SIGUSR1,
            AllOf(HasSubstr("[0] CANCELLED: stopped by signal 10 (SIGUSR1) "
                            "before it began\n"),
                  Not(HasSubstr("[1]")), Not(HasSubstr("by the launcher"))));
}

TEST(RunRanksTest, OthersSayThatARankHasFinished) {
  ExpectEnd("finish_early", "", EXIT_FAILURE,
            ContainsRegex("UNAVAILABLE.*rank 1 .last seen in all-gather #1 of "
                          ".*has left the group: its function has returned"));
}

TEST(RunRanksTest, RanksThatCallDifferentCollectivesEnd) {
  ExpectEnd(
      "differ", "RUN_RANKS_TEST_RANKS=2", EXIT_FAILURE,
      AllOf(ContainsRegex("rank 0 has waited [0-9.]+ m?s for fence #1 of "
                          "common memory; rank 1 is behind by 1 call: it is in "
                          "all-gather #"),
            HasSubstr("DEADLINE_EXCEEDED: fence #1"),
            HasSubstr("rank 1 exited with code 113")));
}

// The rule is the same for one rank and several, whoever gets the signal.
TEST(RunRanksTest, AStoppedProgramReturns128AndTheSignal) {
  for (const auto& [ranks, to_launcher, signal] :
       std::vector<std::tuple<int, bool, int>>{{1, false, SIGTERM},
                                               {1, false, SIGUSR1},
                                               {2, false, SIGINT},
                                               {2, false, SIGUSR1},
                                               {2, true, SIGTERM},
                                               {2, true, SIGUSR1}}) {
    const ProgramOutcome outcome = Execute(
        "stop", absl::StrCat("RUN_RANKS_TEST_SIGNAL=", signal,
                             " RUN_RANKS_TEST_RANKS=", ranks,
                             " RUN_RANKS_TEST_TO_PARENT=", to_launcher));
    EXPECT_EQ(outcome.code, 128 + signal) << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("CANCELLED: after step 7\n"));
    EXPECT_THAT(outcome.output, Not(HasSubstr("aborted")));
  }
}

// A terminal's signal may come to the launcher and to its group.
TEST(RunRanksTest, TwoSignalsAtOnceAreOne) {
  for (const int to_launcher : {0, 1}) {
    const ProgramOutcome outcome =
        Execute("stop", absl::StrCat("RUN_RANKS_TEST_SECOND=", SIGINT,
                                     " RUN_RANKS_TEST_RANKS=2 "
                                     "RUN_RANKS_TEST_TO_PARENT=",
                                     to_launcher));
    EXPECT_THAT(outcome.code, AnyOf(128 + SIGTERM, 128 + SIGINT))
        << outcome.output;
    EXPECT_THAT(outcome.output, HasSubstr("CANCELLED: after step 7\n"));
    EXPECT_THAT(outcome.output, Not(HasSubstr("SIGKILL")));
  }
}

// It may get SIGQUIT and SIGUSR1 before it has ranks, and when they have ended.
TEST(RunRanksTest, QuestionsEndNoLauncher) { ExpectEnd("ask", "", 0); }

// The signal goes to this process, if it is the only rank, to the launcher, or
// to rank 0.
constexpr const char* kVictims[] = {
    "RUN_RANKS_TEST_RANKS=1", "RUN_RANKS_TEST_RANKS=2",
    "RUN_RANKS_TEST_RANKS=2 RUN_RANKS_TEST_TO_PARENT=1"};

TEST(RunRanksTest, AFailureOfAStoppedProgramIsOne) {
  for (const char* victim : kVictims) {
    ExpectEnd("fail_stopped", victim, EXIT_FAILURE);
  }
}

TEST(RunRanksTest, AProgramWhoseWorkIsWholeReturns0) {
  for (const char* victim : kVictims) {
    ExpectEnd("stop", absl::StrCat("RUN_RANKS_TEST_RETURNS_OK=1 ", victim), 0,
              HasSubstr("signal 15 (SIGTERM) came too late to stop"));
  }
}

TEST(RunRanksTest, ALoneRankIsStartedAgainWhereItMayBe) {
  ExpectEnd("fail_alone", "RUN_RANKS_TEST_RESTARTS=1 RUN_RANKS_TEST_RANKS=1", 0,
            AllOf(HasSubstr("[0] rank 0 of 1 has 1\n"),
                  HasSubstr("\nattempt 2 (1 rank, ")));
}

TEST(RunRanksTest, ARankThatOthersHaveStartedStartsNone) {
  ExpectEnd("sum",
            "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", 0,
            AllOf(HasSubstr("rank 0 of 1 has 1\n"), Not(HasSubstr("[0]"))));
}

TEST(RunRanksTest, SaysWhatIsWrongWithTheEnvironment) {
  ExpectEnd("sum", "RANK=zero WORLD_SIZE=2", kUsageErrorExitCode,
            HasSubstr("RANK"));
}

TEST(RunRanksTest, OneRankIsThisProcess) {
  const pid_t self = getpid();
  bool ran = false;
  char* argv[] = {nullptr};
  const auto fn = [&](const std::shared_ptr<Communicator>& ranks) {
    ran = getpid() == self && ranks->world_size() == 1;
    return absl::OkStatus();
  };
  EXPECT_EQ(RunRanks(0, argv, 1, fn), 0);
  EXPECT_TRUE(ran);
  ran = false;
  EXPECT_EQ(RunRanks(0, argv, 0, fn), kUsageErrorExitCode);
  EXPECT_FALSE(ran);
}

// This program has no CUDA; its devices are fakes.
constexpr auto kFake = c10::DeviceType::PrivateUse1;

Environment SecondOf(int ranks) {
  Environment environment;
  environment.rank = environment.local_rank = 1;
  environment.world_size = environment.local_world_size = ranks;
  return environment;
}

TEST(DeviceOfRankTest, RanksShareTheDevicesThatAreThere) {
  FakeDevice::Register();
  for (const int rank : {0, 1, 4}) {
    ASSERT_OK_AND_ASSIGN(const c10::Device device, DeviceOfRank(kFake, rank));
    EXPECT_EQ(device, FakeDevice::device());
  }
}

TEST(DeviceChoiceTest, TheCpuNeedsNoBackend) {
  ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                       ChooseDevice(c10::kCPU, SecondOf(2), nullptr));
  EXPECT_TRUE(found.device.is_cpu());
  EXPECT_FALSE(found.connect);
}

TEST(DeviceChoiceTest, OneRankNeedsNcclOnlyBesideReplicas) {
  FakeDevice::Register();
  ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                       ChooseDevice(kFake, Environment(), nullptr));
  EXPECT_EQ(found.device, FakeDevice::device());
  ConnectOptions options;
  options.device = found.connect;
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Communicator> ranks,
                       Connect(Environment(), options));
  EXPECT_OK(SumRanks(*ranks, FakeDevice::device()));
  EXPECT_OK(SumRanks(*ranks));
  ASSERT_OK_AND_ASSIGN(const auto replicas, CreateLocalGroup(2));
  EXPECT_THAT(
      found.connect({nullptr, 0, absl::Seconds(5), *replicas[0]}).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("2 ranks on privateuseone:0 need NCCL")));
}

TEST(DeviceChoiceTest, RanksHaveNcclWhereItIsLinked) {
  FakeDevice::Register();
  c10::Device given(c10::kCPU);
  const NcclOn nccl_on = [&](c10::Device gpu) {
    given = gpu;
    return StagedBackend(gpu);
  };
  for (const Environment& environment : {Environment(), SecondOf(2)}) {
    given = c10::Device(c10::kCPU);
    ASSERT_OK_AND_ASSIGN(const DeviceChoice found,
                         ChooseDevice(kFake, environment, nccl_on));
    EXPECT_EQ(given, FakeDevice::device());
    EXPECT_TRUE(found.connect);
  }
}

TEST(DeviceChoiceTest, WhatIsNotLinkedIsTold) {
  FakeDevice::Register();
  const auto needs = [](const char* text) {
    return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text));
  };
  EXPECT_THAT(ChooseDevice(c10::kCUDA, Environment(), nullptr).status(),
              needs("without support for cuda devices; for GPUs build with "
                    "--config=cuda"));
  EXPECT_THAT(ChooseDevice(kFake, SecondOf(2), nullptr).status(),
              needs("2 ranks on privateuseone:0 need NCCL"));
}

}  // namespace

int RunTestRole(int argc, char** argv, const std::string& role) {
  signal(SIGINT, SIG_DFL);  // tests may run where it is ignored
  if (role == "told_early" && Number("RANK", 0) == 1) raise(SIGUSR1);
  const StopRequest stop;
  RestartOptions restarts;
  restarts.max_restarts = Number("RUN_RANKS_TEST_RESTARTS", 0);
  restarts.pause = absl::Milliseconds(1);
  ConnectOptions connect;
  connect.warn_after = absl::Milliseconds(100);
  const int code = RunRanks(
      argc, argv, Number("RUN_RANKS_TEST_RANKS", 3),
      [&](const std::shared_ptr<Communicator>& ranks) {
        return RunRole(role, *ranks);
      },
      connect, restarts);
  if (role == "ask" && std::getenv("RANK") == nullptr) {
    raise(SIGQUIT);
    raise(SIGUSR1);
  }
  return code;
}

}  // namespace fsdp::comm

int main(int argc, char** argv) {
  if (const char* role = std::getenv("RUN_RANKS_TEST_ROLE")) {
    return fsdp::comm::RunTestRole(argc, argv, role);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
