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
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/testing/launcher_processes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "replicas/testing/launch_replicas_roles.h"

namespace fsdp::replicas {
namespace {

using comm::kLimit;
using comm::LauncherProcess;
using comm::ProcessEnd;
using comm::UniqueFd;

using ::testing::HasSubstr;

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/task/", pid, "/children"));
  std::vector<pid_t> children;
  for (pid_t child; file >> child;) children.push_back(child);
  return children;
}

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

LauncherProcess Start(const std::string& role) {
  return LauncherProcess(
      std::vector<std::string>{absl::StrCat(kReplicaRole, "=launch_two"),
                               absl::StrCat(kRankRole, "=", role)});
}

TEST(LaunchReplicasSignalsTest, AllEndWithTheLauncher) {
  LauncherProcess launcher = Start("wait");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  const Family family(launcher.process().pid());
  launcher.process().SignalAlone(SIGKILL);
  EXPECT_TRUE(family.AllAreGone());
}

TEST(LaunchReplicasSignalsTest, PassesInterruptsOn) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    LauncherProcess launcher = Start(signal == SIGHUP ? "wait" : "train");
    ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
    const Family family(launcher.process().pid());
    launcher.process().SignalAlone(signal);
    const std::optional<ProcessEnd> end = launcher.WaitForEnd();
    ASSERT_TRUE(end.has_value());
    EXPECT_EQ(end->exit_code, 128 + signal) << launcher.output();
    EXPECT_TRUE(family.AllAreGone());
    if (signal == SIGHUP) continue;
    for (const char* rank : {"[0.0]", "[0.1]", "[1.0]", "[1.1]"}) {
      EXPECT_THAT(launcher.output(),
                  HasSubstr(absl::StrCat(rank, " stopped by ", signal)));
    }
  }
}

TEST(LaunchReplicasSignalsTest, ASecondInterruptKills) {
  LauncherProcess launcher = Start("refuse_to_stop");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  const Family family(launcher.process().pid());
  launcher.process().SignalAlone(SIGINT);
  ASSERT_TRUE(launcher.WaitForLines("] no", 4)) << launcher.output();
  launcher.process().SignalAlone(SIGINT);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 128 + SIGINT);
  EXPECT_TRUE(family.AllAreGone());
}

TEST(LaunchReplicasSignalsTest, QuestionsReachAllRanks) {
  LauncherProcess launcher = Start("answer_questions");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  launcher.process().SignalAlone(SIGQUIT);
  EXPECT_TRUE(launcher.WaitForLines("] asked", 4)) << launcher.output();
  launcher.process().SignalAlone(SIGTERM);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 128 + SIGTERM);
}

TEST(LaunchReplicasSignalsTest, OneSignalEndsTheWaitForAReader) {
  LauncherProcess launcher = Start("print_much");
  const pid_t pid = launcher.process().pid();
  const absl::Time deadline = absl::Now() + kLimit;
  // The first child is the keeper; then launchers come, and go.
  const auto wait_for = [&](size_t children) {
    while (ChildrenOf(pid).size() != children && absl::Now() < deadline) {
      poll(nullptr, 0, 1);
    }
  };
  wait_for(3);
  wait_for(1);
  launcher.process().SignalAlone(SIGTERM);
  const std::optional<ProcessEnd> end = launcher.WaitForEndUnread();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 0);  // as the ranks
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

TEST(LaunchReplicasSignalsTest, StopsAndGoesOnWithAllRanks) {
  LauncherProcess launcher = Start("train");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  const Family family(launcher.process().pid());
  for (int turn = 0; turn < 2; ++turn) {
    launcher.process().SignalAlone(SIGTSTP);
    ASSERT_TRUE(IsStopped(launcher.process().pid()));
    for (const int replica : {0, 1}) {
      EXPECT_TRUE(IsStopped(family.launcher(replica)));
      for (const pid_t rank : family.ranks(replica)) {
        EXPECT_TRUE(IsStopped(rank));
      }
    }
    launcher.process().SignalAlone(SIGCONT);
  }
  launcher.process().SignalAlone(SIGINT);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 128 + SIGINT);
  EXPECT_THAT(launcher.output(), HasSubstr("[1.1] stopped by 2"));
}

TEST(LaunchReplicasSignalsTest, WithoutTheKeeperTheJobEnds) {
  LauncherProcess launcher = Start("wait");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  const Family family(launcher.process().pid());
  ASSERT_EQ(kill(family.keeper(), SIGKILL), 0);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->exit_code, 1);
  EXPECT_THAT(launcher.output(),
              HasSubstr("the keeper of the replicas was killed by signal 9 "
                        "(SIGKILL); the job ends\n"));
  EXPECT_TRUE(family.AllAreGone());
}

TEST(LaunchReplicasSignalsTest, AReplicaEndsWithItsLauncherAlone) {
  LauncherProcess launcher = Start("wait");
  ASSERT_TRUE(launcher.WaitForLines("ready", 4)) << launcher.output();
  const Family family(launcher.process().pid());
  ASSERT_EQ(kill(family.launcher(1), SIGKILL), 0);
  for (const pid_t rank : family.ranks(1)) EXPECT_TRUE(family.IsGone(rank));
  for (const pid_t rank : family.ranks(0)) EXPECT_TRUE(family.IsThere(rank));
  EXPECT_TRUE(family.IsThere(family.keeper()));
  launcher.process().SignalAlone(SIGTERM);
  const std::optional<ProcessEnd> end = launcher.WaitForEnd();
  ASSERT_TRUE(end.has_value());
  EXPECT_THAT(launcher.output(),
              HasSubstr("replica 1 killed by signal 9 (SIGKILL)"));
  EXPECT_TRUE(family.AllAreGone());
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
