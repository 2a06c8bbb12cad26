#include "comm/host/shared_segment.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "absl/strings/match.h"
#include "base/testing/process_limits.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
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
  const ::fsdp::testing::ResourceLimit limit(RLIMIT_FSIZE, 4096);
  EXPECT_OK(SharedSegment::Create(4096));
  EXPECT_THAT(SharedSegment::Create(1 << 20),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       ::testing::AllOf(HasSubstr("1048576 bytes"),
                                        HasSubstr("ulimit -f"))));
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

TEST(PeerProcessTest, MayEndWhileItIsLookedAt) {
  for (int i = 0; i < 200; ++i) {
    const pid_t pid = Spawn();
    const PeerProcess process(pid);
    std::thread end([pid] {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    });
    std::string seen;
    do {
      EXPECT_NO_THROW(seen = process.Describe());
    } while (absl::StrContains(seen, " runs"));
    end.join();
  }
}

namespace fs = std::filesystem;

constexpr int64_t kMachine = int64_t{1000} << 20;

// Imitates a system in a directory.
class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest()
      : root_(fs::path(::testing::TempDir()) /
              ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
    Write("proc/meminfo",
          "MemTotal:        9999999 kB\nMemFree:          500 kB\n"
          "MemAvailable:    1024000 kB\nBuffers:  1 kB\n");
  }

  void Write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void Version2(const std::string& group, const std::string& max,
                int64_t current, int64_t cached = 0) const {
    const std::string directory = "sys/fs/cgroup" + group;
    Write(directory + "/memory.max", max + "\n");
    Write(directory + "/memory.current", std::to_string(current));
    Write(directory + "/memory.stat", "anon 77\nactive_file 5\ninactive_file " +
                                          std::to_string(cached) +
                                          "\nslab 3\n");
  }
  void Version1(const std::string& group, int64_t limit, int64_t usage,
                int64_t cached = 0) const {
    const std::string directory = "sys/fs/cgroup/memory" + group;
    Write(directory + "/memory.limit_in_bytes", std::to_string(limit));
    Write(directory + "/memory.usage_in_bytes", std::to_string(usage));
    Write(directory + "/memory.stat", "inactive_file 1\ntotal_inactive_file " +
                                          std::to_string(cached) + "\n");
  }
  void MountVersion2(const std::string& group = "/") const {
    Write("proc/self/mountinfo",
          "24 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n31 24 0:27 " + group +
              " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n");
  }
  void MountVersion1(const std::string& group = "/") const {
    Write("proc/self/mountinfo",
          "32 24 0:28 " + group +
              " /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu\n33 24 "
              "0:29 " +
              group +
              " /sys/fs/cgroup/memory rw shared:7 - cgroup cgroup rw,memory\n");
  }

  int64_t Available() const { return AvailableMemory(root_); }

  const fs::path root_;
};

TEST_F(AvailableMemoryTest, IsTheMachinesWithoutGroups) {
  EXPECT_EQ(Available(), kMachine);
  fs::remove_all(root_);
  EXPECT_EQ(Available(), std::numeric_limits<int64_t>::max());
}

TEST_F(AvailableMemoryTest, IsThatOfTheTightestGroupAround) {
  MountVersion2();
  Write("proc/self/cgroup", "0::/user/job/rank\n");
  Version2("/user/job/rank", "max", 10);
  Version2("/user/job", "900", 100);
  Version2("/user", "5000", 4500);
  EXPECT_EQ(Available(), 500);
  Version2("/user/job", "900", 500);
  EXPECT_EQ(Available(), 400);
  Version2("/user/job/rank", "310", 10);
  EXPECT_EQ(Available(), 300);
  Version2("", "200", 10);
  EXPECT_EQ(Available(), 190);
  Version2("/user/job/rank", "310", 999);
  EXPECT_EQ(Available(), 0);
  // These groups are not around the process's.
  Version2("/user/job/rank", "max", 10);
  Version2("/user/job/rank/inside", "20", 19);
  Version2("/user/other", "20", 19);
  EXPECT_EQ(Available(), 190);
}

TEST_F(AvailableMemoryTest, IsTheMachinesWhereGroupsAllowMore) {
  MountVersion2();
  Write("proc/self/cgroup", "0::/job\n");
  Version2("/job", std::to_string(8 * kMachine), 0);
  EXPECT_EQ(Available(), kMachine);
}

TEST_F(AvailableMemoryTest, KnowsVersion1) {
  MountVersion1();
  Write("proc/self/cgroup",
        "5:cpuset:/elsewhere\n4:cpu,memory,pids:/user/job\n1:name=systemd:/x\n"
        "0::/y\n");
  Version1("/user/job", 9223372036854771712, 10);
  Version1("/user", 800, 300);
  Version1("/elsewhere", 20, 19);
  EXPECT_EQ(Available(), 500);
}

TEST_F(AvailableMemoryTest, WhatIsCachedIsFree) {
  MountVersion2();
  Write("proc/self/cgroup", "0::/job\n");
  Version2("/job", "900", 800, /*cached=*/500);
  EXPECT_EQ(Available(), 600);
  MountVersion1();
  Write("proc/self/cgroup", "4:memory:/job\n");
  Version1("/job", 900, 800, /*cached=*/300);
  EXPECT_EQ(Available(), 400);
}

TEST_F(AvailableMemoryTest, AContainerSeesItsOwnGroupAsTheRoot) {
  // The container has a name space of its own.
  MountVersion2();
  Write("proc/self/cgroup", "0::/\n");
  Version2("", "700", 100);
  EXPECT_EQ(Available(), 600);
  // The container has no name space, but a mount.
  MountVersion1("/docker/abc");
  Write("proc/self/cgroup", "4:memory:/docker/abc/inner\n");
  Version1("", 500, 100);
  Version1("/inner", 500, 200);
  EXPECT_EQ(Available(), 300);
  // The process was moved to where its name cannot say.
  Write("proc/self/cgroup", "4:memory:/../other\n");
  EXPECT_EQ(Available(), 400);
}

}  // namespace
}  // namespace fsdp::comm
