#include "comm/host/available_memory.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

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
