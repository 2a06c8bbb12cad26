// Launchers of replicas that are told to end, stopped, asked and killed.
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/testing/this_program.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/testing/launch_replicas_roles.h"

namespace fsdp::replicas {
namespace {

using comm::kLimit;

using ::fsdp::testing::ChildProcess;
using ::fsdp::testing::ProgramPath;
using ::testing::HasSubstr;

// All processes below a launcher of two replicas of two ranks. They are there
// once the ranks have said so.
class Family {
 public:
  explicit Family(pid_t launcher) {
    const std::vector<pid_t> children = ChildrenOf(launcher);
    FSDP_CHECK(children.size() == 3);
    keeper_ = Watch(children[0]);
    for (const int replica : {0, 1}) {
      launchers_.push_back(Watch(children[1 + replica]));
      for (const pid_t rank : ChildrenOf(children[1 + replica])) {
        ranks_[replica].push_back(Watch(rank));
      }
      FSDP_CHECK(ranks_[replica].size() == 2);
    }
  }

  pid_t keeper() const { return keeper_; }
  pid_t launcher(int replica) const { return launchers_[replica]; }
  const std::vector<pid_t>& ranks(int replica) const {
    return ranks_.at(replica);
  }

  bool IsGone(pid_t pid, absl::Duration within = kLimit) const {
    pollfd end = {pidfds_.at(pid).get(), POLLIN, 0};
    return poll(&end, 1, static_cast<int>(absl::ToInt64Milliseconds(within))) ==
           1;
  }
  bool IsThere(pid_t pid) const { return !IsGone(pid, absl::ZeroDuration()); }
  bool AllAreGone() const {
    for (const auto& [pid, fd] : pidfds_) {
      if (!IsGone(pid)) return false;
    }
    return true;
  }

 private:
  pid_t Watch(pid_t pid) {
    pidfds_[pid] = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    FSDP_CHECK(pidfds_[pid].is_open());
    return pid;
  }

  pid_t keeper_;
  std::vector<pid_t> launchers_;
  std::map<int, std::vector<pid_t>> ranks_;
  std::map<pid_t, UniqueFd> pidfds_;
};

// A launcher of two replicas whose ranks are ready.
class LaunchReplicasSignalsTest : public ::testing::Test {
 protected:
  void StartLauncher(const std::string& role) {
    launcher_.emplace(absl::StrCat("env ", kReplicaRole, "=launch_two ",
                                   kRankRole, "=", role, " '", ProgramPath(),
                                   "'"));
  }
  void Start(const std::string& role) {
    StartLauncher(role);
    ASSERT_TRUE(launcher_->AwaitLines("ready", 4)) << launcher_->output();
    family_.emplace(pid());
  }
  pid_t pid() { return launcher_->pid(); }
  void Signal(int signal) { launcher_->Signal(signal); }
  void ExpectEnd(int code) {
    EXPECT_EQ(launcher_->Wait(), code) << launcher_->output();
    EXPECT_TRUE(family_->AllAreGone());
  }

  std::optional<ChildProcess> launcher_;
  std::optional<Family> family_;
};

TEST_F(LaunchReplicasSignalsTest, AllEndWithTheLauncher) {
  Start("wait");
  Signal(SIGKILL);
  EXPECT_TRUE(family_->AllAreGone());
}

TEST_F(LaunchReplicasSignalsTest, PassesInterruptsOn) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Start(signal == SIGHUP ? "wait" : "train");
    Signal(signal);
    ExpectEnd(128 + signal);
    if (signal == SIGHUP) continue;
    for (const char* rank : {"[0.0]", "[0.1]", "[1.0]", "[1.1]"}) {
      EXPECT_THAT(launcher_->output(),
                  HasSubstr(absl::StrCat(rank, " stopped by ", signal)));
    }
  }
}

TEST_F(LaunchReplicasSignalsTest, ASecondInterruptKills) {
  Start("refuse_to_stop");
  Signal(SIGINT);
  ASSERT_TRUE(launcher_->AwaitLines("] heard", 4)) << launcher_->output();
  Signal(SIGINT);
  ExpectEnd(128 + SIGINT);
}

TEST_F(LaunchReplicasSignalsTest, QuestionsReachAllRanks) {
  Start("answer_questions");
  Signal(SIGQUIT);
  EXPECT_TRUE(launcher_->AwaitLines("] heard", 4)) << launcher_->output();
  Signal(SIGTERM);
  ExpectEnd(128 + SIGTERM);
}

TEST_F(LaunchReplicasSignalsTest, OneSignalEndsTheWaitForAReader) {
  StartLauncher("print_much");
  const absl::Time deadline = absl::Now() + kLimit;
  // The first child is the keeper; then launchers come, and go.
  for (const size_t children : {size_t{3}, size_t{1}}) {
    while (ChildrenOf(pid()).size() != children && absl::Now() < deadline) {
      poll(nullptr, 0, 1);
    }
  }
  Signal(SIGTERM);
  EXPECT_EQ(launcher_->WaitUnread(), 0);  // as the ranks
}

// 'T' while it is stopped.
bool IsStopped(pid_t pid) {
  const absl::Time deadline = absl::Now() + kLimit;
  while (absl::Now() < deadline) {
    std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
    std::string number, name, state;
    if (file >> number >> name >> state && state == "T") return true;
    poll(nullptr, 0, 1);
  }
  return false;
}

TEST_F(LaunchReplicasSignalsTest, StopsAndGoesOnWithAllRanks) {
  Start("train");
  for (int turn = 0; turn < 2; ++turn) {
    Signal(SIGTSTP);
    ASSERT_TRUE(IsStopped(pid()));
    for (const int replica : {0, 1}) {
      EXPECT_TRUE(IsStopped(family_->launcher(replica)));
      for (const pid_t rank : family_->ranks(replica)) {
        EXPECT_TRUE(IsStopped(rank));
      }
    }
    Signal(SIGCONT);
  }
  Signal(SIGINT);
  ExpectEnd(128 + SIGINT);
  EXPECT_THAT(launcher_->output(), HasSubstr("[1.1] stopped by 2"));
}

TEST_F(LaunchReplicasSignalsTest, WithoutTheKeeperTheJobEnds) {
  Start("wait");
  ASSERT_EQ(kill(family_->keeper(), SIGKILL), 0);
  ExpectEnd(1);
  EXPECT_THAT(launcher_->output(),
              HasSubstr("the keeper of the replicas was killed by signal 9 "
                        "(SIGKILL); the job ends\n"));
}

TEST_F(LaunchReplicasSignalsTest, AReplicaEndsWithItsLauncherAlone) {
  Start("wait");
  ASSERT_EQ(kill(family_->launcher(1), SIGKILL), 0);
  for (const pid_t rank : family_->ranks(1)) EXPECT_TRUE(family_->IsGone(rank));
  for (const pid_t rank : family_->ranks(0)) {
    EXPECT_TRUE(family_->IsThere(rank));
  }
  EXPECT_TRUE(family_->IsThere(family_->keeper()));
  Signal(SIGTERM);
  launcher_->Wait();
  EXPECT_THAT(launcher_->output(),
              HasSubstr("replica 1 killed by signal 9 (SIGKILL)"));
  EXPECT_TRUE(family_->AllAreGone());
}

}  // namespace
}  // namespace fsdp::replicas
