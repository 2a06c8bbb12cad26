#include "comm/host/shared_segment.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "absl/status/status.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FileSizeLimit;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(SharedSegmentTest, IsZeroAndOneMemoryForAllWhoOpenIt) {
  for (int64_t bytes : {0, 1, 4096, 100'003}) {
    auto made = SharedSegment::Create(bytes);
    ASSERT_OK(made);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ((*made)->data()[i], 0);
    auto opened = SharedSegment::Open((*made)->address());
    ASSERT_OK(opened);
    EXPECT_NE((*opened)->data(), (*made)->data());
    EXPECT_EQ((*opened)->bytes(), bytes);
    EXPECT_TRUE((*opened)->address() == (*made)->address());
    if (bytes == 0) continue;
    (*made)->data()[bytes - 1] = 7;
    EXPECT_EQ((*opened)->data()[bytes - 1], 7);
  }
}

TEST(SharedSegmentTest, OutlivesItsMaker) {
  auto made = SharedSegment::Create(10).value();
  auto opened = SharedSegment::Open(made->address()).value();
  std::strcpy(made->data(), "still");
  made.reset();
  EXPECT_STREQ(opened->data(), "still");
  // The segment can be opened by way of anybody who has it.
  auto again = SharedSegment::Open(opened->address());
  ASSERT_OK(again);
  EXPECT_STREQ((*again)->data(), "still");
}

TEST(SharedSegmentTest, CannotBeOpenedOnceSealedOrGone) {
  auto made = SharedSegment::Create(10).value();
  const SegmentAddress address = made->address();
  made->Seal();
  EXPECT_THAT(SharedSegment::Open(address),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("open 10 bytes of shared memory")));
  // Another segment has taken over the number.
  auto other = SharedSegment::Create(10).value();
  SegmentAddress wrong = address;
  wrong.descriptor = other->address().descriptor;
  EXPECT_THAT(
      SharedSegment::Open(wrong),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("has given it back")));
}

TEST(SharedSegmentTest, RefusesWhatThereIsNot) {
  EXPECT_THAT(SharedSegment::Create(-1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
  EXPECT_THAT(SharedSegment::Create(int64_t{1} << 50),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("of shared memory")));
}

TEST(SharedSegmentTest, ALimitOnTheSizeOfFilesIsAnError) {
  const FileSizeLimit limit(4096);
  EXPECT_OK(SharedSegment::Create(4096));
  EXPECT_THAT(
      SharedSegment::Create(1 << 20),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("1048576 bytes"), HasSubstr("ulimit -f"))));
}

TEST(SharedSegmentTest, HostsHaveAnIdentity) {
  EXPECT_EQ(HostIdentity(), HostIdentity());
  EXPECT_GT(HostIdentity().size(), 30u);
}

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
