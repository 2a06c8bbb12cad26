#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "comm/startup/environment.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

class UsableCoresTest : public ::testing::Test {
 protected:
  UsableCoresTest() { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file(root_ + path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }

  const std::string root_ = ::testing::TempDir() + "/root";
};

TEST_F(UsableCoresTest, AreThoseOfTheAffinity) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(UsableCores(root_), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  int core = 0;
  while (!CPU_ISSET(core, &before)) ++core;
  CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(UsableCores(root_), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST_F(UsableCoresTest, AQuotaOfAGroupOrOneAboveItIsLess) {
  Write("/proc/self/cgroup", "0::/pod/job");
  Write("/sys/fs/cgroup/pod/job/cpu.max", "max 100000");
  const int all = UsableCores(root_);
  Write("/sys/fs/cgroup/pod/cpu.max", "100000 100000");
  EXPECT_EQ(UsableCores(root_), 1);
  Write("/sys/fs/cgroup/pod/cpu.max", "10000 100000");
  EXPECT_EQ(UsableCores(root_), 1);
  Write("/sys/fs/cgroup/pod/cpu.max", "100000000 100000");
  EXPECT_EQ(UsableCores(root_), all);
  if (all > 1) {
    Write("/sys/fs/cgroup/pod/cpu.max", "150000 100000");
    EXPECT_EQ(UsableCores(root_), 2);
  }
}

TEST_F(UsableCoresTest, AQuotaOfVersionOneIsLess) {
  Write("/proc/self/cgroup", "7:memory:/job\n4:cpu,cpuacct:/job");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1");
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000");
  const int all = UsableCores(root_);
  EXPECT_GE(all, 1);
  Write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000");
  EXPECT_EQ(UsableCores(root_), 1);
}

TEST_F(UsableCoresTest, WhatCannotBeReadIsNoLimit) {
  for (const char* const text : {"", "0", "0::", "0::relative", "x:y:z"}) {
    Write("/proc/self/cgroup", text);
    EXPECT_GE(UsableCores(root_), 1) << text;
  }
}

TEST(ThreadsPerRankTest, DividesTheCoresUnlessTheUserSaysOtherwise) {
  unsetenv("OMP_NUM_THREADS");
  const int cores = UsableCores();
  EXPECT_EQ(ThreadsPerRank(1), cores);
  EXPECT_EQ(ThreadsPerRank(cores), 1);
  EXPECT_EQ(ThreadsPerRank(1000 * cores), 1);
  setenv("OMP_NUM_THREADS", "7", 1);
  EXPECT_EQ(ThreadsPerRank(3), 7);
  setenv("OMP_NUM_THREADS", "many", 1);
  EXPECT_EQ(ThreadsPerRank(1), cores);
}

}  // namespace
}  // namespace fsdp::comm
