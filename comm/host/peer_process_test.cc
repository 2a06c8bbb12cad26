#include "comm/host/peer_process.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::testing::HasSubstr;

// Starts a process that runs until it is killed.
pid_t Spawn() {
  char program[] = "sleep";
  char forever[] = "infinity";
  char* argv[] = {program, forever, nullptr};
  pid_t pid = 0;
  EXPECT_EQ(posix_spawnp(&pid, program, nullptr, nullptr, argv, environ), 0);
  return pid;
}

TEST(PeerProcessTest, TellsStoppedFromEnded) {
  const pid_t pid = Spawn();
  const PeerProcess process(pid);
  EXPECT_FALSE(process.HasEnded());
  EXPECT_THAT(process.Describe(), HasSubstr(" runs"));
  kill(pid, SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(pid, &status, WUNTRACED), pid);
  EXPECT_FALSE(process.HasEnded());
  EXPECT_THAT(process.Describe(), HasSubstr(" is stopped"));
  kill(pid, SIGKILL);
  siginfo_t info;
  // The process has ended, but nobody has asked for its exit status yet.
  ASSERT_EQ(waitid(P_PID, pid, &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(process.HasEnded());
  EXPECT_THAT(process.Describe(), HasSubstr(" has ended"));
  ASSERT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(process.HasEnded());
  EXPECT_TRUE(PeerProcess(pid).HasEnded());
}

TEST(PeerProcessTest, ThisProcessRuns) {
  const PeerProcess self(getpid());
  EXPECT_FALSE(self.HasEnded());
  EXPECT_EQ(self.pid(), getpid());
}

}  // namespace
}  // namespace fsdp::comm
