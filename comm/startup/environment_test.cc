#include "comm/startup/environment.h"

#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Map = std::map<std::string, std::string>;

absl::StatusOr<Environment> Read(const Map& map) {
  return ReadEnvironment([&map](const char* name) -> const char* {
    auto found = map.find(name);
    return found == map.end() ? nullptr : found->second.c_str();
  });
}

Map With(Map map, const Map& changes) {
  for (const auto& [name, value] : changes) map[name] = value;
  return map;
}

Map Without(Map map, const std::string& name) {
  map.erase(name);
  return map;
}

const Map& Torchrun() {
  static const Map& map = *new Map{
      {"RANK", "5"},           {"WORLD_SIZE", "8"},
      {"LOCAL_RANK", "1"},     {"LOCAL_WORLD_SIZE", "4"},
      {"MASTER_ADDR", "host"}, {"MASTER_PORT", "29500"},
  };
  return map;
}

const Map& Slurm() {
  static const Map& map = *new Map{
      {"SLURM_PROCID", "4"},
      {"SLURM_NTASKS", "7"},
      {"SLURM_LOCALID", "0"},
      {"SLURM_NODEID", "2"},
      {"SLURM_STEP_TASKS_PER_NODE", "2(x3),1"},
      {"SLURM_JOB_NODELIST", "node[003-005,12]"},
      {"SLURM_JOB_ID", "1234567"},
      {"SLURM_STEP_ID", "0"},
  };
  return map;
}

const Map& OpenMpi() {
  static const Map& map = *new Map{
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
  };
  return map;
}

const Map& Mpi() {
  static const Map& map = *new Map{
      {"PMI_RANK", "5"},        {"PMI_SIZE", "8"},
      {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"},
      {"MASTER_ADDR", "host"},  {"MASTER_PORT", "29500"},
  };
  return map;
}

void ExpectRanks(const Environment& environment, int rank, int world_size,
                 int local_rank, int local_world_size) {
  EXPECT_EQ(environment.rank, rank);
  EXPECT_EQ(environment.world_size, world_size);
  EXPECT_EQ(environment.local_rank, local_rank);
  EXPECT_EQ(environment.local_world_size, local_world_size);
}

// Variables, and what is read of them: ranks as in ExpectRanks(), and where
// they meet.
struct Reading {
  Map map;
  int rank, world_size, local_rank, local_world_size;
  std::string master_addr;
  int master_port;
  StartedBy started_by;
};

TEST(EnvironmentTest, ReadsRanksAndWhereTheyMeet) {
  const Map step = {{"SLURM_STEP_NUM_TASKS", "2"},
                    {"SLURM_PROCID", "1"},
                    {"SLURM_STEP_NODELIST", "login,node[1-2]"},
                    {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
                    {"SLURM_NODEID", "1"},
                    {"SLURM_STEP_ID", "3"}};
  const Map without_list = Without(Slurm(), "SLURM_STEP_TASKS_PER_NODE");
  // Allocations and addresses alone start no ranks.
  const Map starts_none = {{"MASTER_ADDR", "host"},
                           {"MASTER_PORT", "29500"},
                           {"RANK", ""},
                           {"SLURM_NTASKS", "1"},
                           {"SLURM_JOB_ID", "7"}};
  // Neither do the shells of a job, a script's and salloc's.
  Map script = Without(Slurm(), "SLURM_STEP_ID");
  script = With(script, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  const Map salloc = With(script, {{"SLURM_STEP_ID", "4294967290"}});
  constexpr auto kNobody = StartedBy::kNobody;
  constexpr auto kTorchrun = StartedBy::kTorchrun;
  constexpr auto kSlurm = StartedBy::kSlurm;
  constexpr auto kOpenMpi = StartedBy::kOpenMpi;
  constexpr int kSlurmPort = 15000 + 4567;
  const std::vector<Reading> readings = {
      {{}, 0, 1, 0, 1, "", 0, kNobody},
      {starts_none, 0, 1, 0, 1, "", 0, kNobody},
      {script, 0, 1, 0, 1, "", 0, kNobody},
      {salloc, 0, 1, 0, 1, "", 0, kNobody},
      {With(Without(Slurm(), "SLURM_STEP_ID"), {{"SLURM_STEPID", "0"}}), 4, 7,
       0, 2, "node003", kSlurmPort, kSlurm},
      {Torchrun(), 5, 8, 1, 4, "host", 29500, kTorchrun},
      // One rank per host needs no local rank.
      {Without(Without(Torchrun(), "LOCAL_RANK"), "LOCAL_WORLD_SIZE"), 5, 8, 0,
       1, "host", 29500, kTorchrun},
      // The innermost launcher counts.
      {With(With(Slurm(), OpenMpi()), Torchrun()), 5, 8, 1, 4, "host", 29500,
       kTorchrun},
      {With(With(Slurm(), OpenMpi()),
            {{"MASTER_ADDR", "host"}, {"MASTER_PORT", "29500"}}),
       1, 2, 1, 2, "host", 29500, kOpenMpi},
      {Mpi(), 5, 8, 1, 4, "host", 29500, StartedBy::kMpi},
      {Slurm(), 4, 7, 0, 2, "node003", kSlurmPort, kSlurm},
      {With(Slurm(), Mpi()), 5, 8, 1, 4, "host", 29500, StartedBy::kMpi},
      // srun speaks PMI, too.
      {With(Slurm(), {{"PMI_RANK", "4"}, {"PMI_SIZE", "7"}}), 4, 7, 0, 2,
       "node003", kSlurmPort, kSlurm},
      {With(Slurm(), {{"SLURM_PROCID", "6"}, {"SLURM_NODEID", "3"}}), 6, 7, 0,
       1, "node003", kSlurmPort, kSlurm},
      // A step comes before the job.
      {With(Slurm(), step), 1, 2, 0, 1, "login", kSlurmPort + 3 * 131, kSlurm},
      // Without a list of tasks the bound of a host counts.
      {With(without_list, {{"SLURM_NTASKS_PER_NODE", "4"}}), 4, 7, 0, 4,
       "node003", kSlurmPort, kSlurm},
      {With(without_list, {{"SLURM_NTASKS_PER_NODE", "64"}}), 4, 7, 0, 7,
       "node003", kSlurmPort, kSlurm},
      {With(Slurm(), {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}}), 4,
       7, 0, 2, "10.0.0.1", 4000, kSlurm},
  };
  for (const Reading& expected : readings) {
    SCOPED_TRACE(::testing::PrintToString(expected.map));
    ASSERT_OK_AND_ASSIGN(const Environment read, Read(expected.map));
    ExpectRanks(read, expected.rank, expected.world_size, expected.local_rank,
                expected.local_world_size);
    EXPECT_EQ(read.master_addr, expected.master_addr);
    EXPECT_EQ(read.master_port, expected.master_port);
    EXPECT_EQ(read.started_by, expected.started_by);
    EXPECT_FALSE(read.agent_store);
    EXPECT_EQ(read.secret, "");
    EXPECT_EQ(read.listen_fd, -1);
  }
}

TEST(EnvironmentTest, ReadsTorchrunsAgentStoreAndRestartsAndTheLauncher) {
  ASSERT_OK_AND_ASSIGN(
      Environment environment,
      Read(With(Torchrun(), {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_MAX_RESTARTS", "5"},
                             {"GLOO_SOCKET_IFNAME", "eth1"},
                             {"FSDP_JOB_SECRET", "ours"},
                             {"FSDP_INSPECT_DIR", "/tmp/hangs"}})));
  EXPECT_TRUE(environment.agent_store);
  EXPECT_EQ(environment.agent_store_prefix, "/worker/attempt_2_of_8_ranks");
  EXPECT_EQ(environment.interface, "eth1");
  EXPECT_EQ(environment.secret, "ours");
  EXPECT_EQ(environment.inspection_folder, "/tmp/hangs");
  EXPECT_EQ(environment.restart_count, 2);
  EXPECT_EQ(environment.max_restarts, 5);
  ASSERT_OK_AND_ASSIGN(environment, Read(Torchrun()));
  EXPECT_EQ(environment.restart_count, 0);
  EXPECT_EQ(environment.max_restarts, 0);
  EXPECT_THAT(Read(With(Torchrun(), {{"TORCHELASTIC_RESTART_COUNT", "-1"}})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("TORCHELASTIC_RESTART_COUNT=-1")));
  ASSERT_OK_AND_ASSIGN(
      environment,
      Read(With(Torchrun(), {{"FSDP_LAUNCHER", "1"},
                             {"FSDP_LAUNCHER_LISTEN_FD", "7"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}})));
  EXPECT_EQ(environment.started_by, StartedBy::kRanksFlag);
  EXPECT_EQ(environment.listen_fd, 7);
  EXPECT_FALSE(environment.agent_store);
}

const Map& Replica() {
  static const Map& map = *new Map{
      {"FSDP_REPLICA", "2"},
      {"FSDP_REPLICAS", "3"},
      {"FSDP_REPLICA_INCARNATION", "4"},
      {"FSDP_REPLICA_STORE", "node1:29400"},
  };
  return map;
}

void ExpectReplica(const Environment& environment, int incarnation) {
  EXPECT_EQ(environment.replica, 2);
  EXPECT_EQ(environment.replicas, 3);
  EXPECT_EQ(environment.replica_incarnation, incarnation);
  EXPECT_EQ(environment.keeper_addr, "node1");
  EXPECT_EQ(environment.keeper_port, 29400);
  EXPECT_FALSE(environment.kept_store);
}

TEST(EnvironmentTest, ReadsTheReplicaBesideTheRank) {
  for (const Map& launcher : {Map(), Slurm(), Torchrun()}) {
    ASSERT_OK_AND_ASSIGN(const Environment plain, Read(launcher));
    EXPECT_EQ(plain.replicas, 0);
    ASSERT_OK_AND_ASSIGN(const Environment environment,
                         Read(With(launcher, Replica())));
    ExpectReplica(environment, 4);
    ExpectRanks(environment, plain.rank, plain.world_size, plain.local_rank,
                plain.local_world_size);
    EXPECT_EQ(environment.master_addr, plain.master_addr);
    EXPECT_EQ(environment.master_port, plain.master_port);
  }
}

// The launcher of --ranks gives each attempt an incarnation of its own.
TEST(EnvironmentTest, EachAttemptOfTorchrunIsAnotherIncarnation) {
  const Map restarted =
      With(With(Torchrun(), Replica()), {{"TORCHELASTIC_RESTART_COUNT", "2"}});
  ASSERT_OK_AND_ASSIGN(Environment environment, Read(restarted));
  ExpectReplica(environment, 4 + 2);
  ASSERT_OK_AND_ASSIGN(environment,
                       Read(With(restarted, {{"FSDP_LAUNCHER", "1"}})));
  ExpectReplica(environment, 4);
  EXPECT_THAT(
      Read(With(restarted, {{"FSDP_REPLICA_INCARNATION", "2147483646"}})),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("FSDP_REPLICA_INCARNATION=2147483646")));
}

TEST(EnvironmentTest, AKeeperHasAHostThatMayBeAnAddressAndAPort) {
  for (const char* host : {"10.0.0.1", "fe80::1"}) {
    const std::string place = absl::StrCat("[", host, "]:1");
    ASSERT_OK_AND_ASSIGN(
        const Environment environment,
        Read(With(Replica(), {{"FSDP_REPLICA_STORE", place}})));
    EXPECT_EQ(environment.keeper_addr, host);
    EXPECT_EQ(environment.keeper_port, 1);
  }
  for (const char* place :
       {"node1", "29400", ":29400", "node1:", "node1:0", "node1:65536",
        "node1:x", "::1:29400", "[]:29400", "[::1:29400", "::1]:29400",
        "[a]b:29400", "[[a]]:29400", "[node1:29400", "[:29400"}) {
    EXPECT_THAT(Read(With(Replica(), {{"FSDP_REPLICA_STORE", place}})),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(std::string("FSDP_REPLICA_STORE=") +
                                         place + ": expected the host"),
                               HasSubstr("node1:29400 or [::1]:29400"))));
  }
}

TEST(EnvironmentTest, OpenMpiOnOneHostNeedsNoAddress) {
  ASSERT_OK_AND_ASSIGN(Environment one,
                       Read(With(OpenMpi(), {{"PMIX_NAMESPACE", "host@1"}})));
  ExpectRanks(one, 1, 2, 1, 2);
  EXPECT_EQ(one.master_addr, "127.0.0.1");
  EXPECT_GE(one.master_port, 15000);
  EXPECT_LT(one.master_port, 25000);
  ASSERT_OK_AND_ASSIGN(Environment other,
                       Read(With(OpenMpi(), {{"PMIX_NAMESPACE", "host@2"}})));
  EXPECT_NE(one.master_port, other.master_port);
}

struct Refusal {
  Map map;
  std::vector<std::string> message;  // parts of it
};

TEST(EnvironmentTest, RefusesWithVariableValueAndExpectation) {
  const Map two_hosts = With(OpenMpi(), {{"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}});
  const Map script = Without(Slurm(), "SLURM_STEP_ID");
  const std::vector<Refusal> refusals = {
      {Without(Torchrun(), "WORLD_SIZE"),
       {"WORLD_SIZE is not set", "torchrun"}},
      {Without(Torchrun(), "RANK"), {"RANK is not set", "WORLD_SIZE=8"}},
      {Without(Torchrun(), "LOCAL_RANK"), {"LOCAL_RANK is not set"}},
      {{{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "7"}},
       {"SLURM_NTASKS=4", "srun has not started this process"}},
      {With(script, {{"SLURM_NTASKS", "4"}}),
       {"SLURM_NTASKS=4", "srun has not started this process"}},
      {Without(Torchrun(), "LOCAL_WORLD_SIZE"), {"LOCAL_WORLD_SIZE is not"}},
      {Without(Torchrun(), "MASTER_ADDR"), {"MASTER_ADDR is not set"}},
      {Without(Torchrun(), "MASTER_PORT"), {"MASTER_PORT is not set"}},
      {With(Torchrun(), {{"RANK", "8"}}), {"RANK=8", "less than WORLD_SIZE=8"}},
      {With(Torchrun(), {{"RANK", "-1"}}), {"RANK=-1", "at least 0"}},
      {With(Torchrun(), {{"RANK", "1x"}}), {"RANK=1x", "an integer"}},
      {With(Torchrun(), {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0", "at least 1"}},
      {With(Torchrun(), {{"WORLD_SIZE", "99999999999"}}), {"99999999999"}},
      {With(Torchrun(), {{"LOCAL_RANK", "4"}}),
       {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"}},
      {With(Torchrun(), {{"LOCAL_WORLD_SIZE", "9"}}),
       {"LOCAL_WORLD_SIZE=9", "at most", "8"}},
      {With(Torchrun(), {{"MASTER_PORT", "0"}}),
       {"MASTER_PORT=0", "1 to 65535"}},
      {With(Torchrun(), {{"MASTER_PORT", "65536"}}), {"MASTER_PORT=65536"}},
      {{{"LOCAL_RANK", "0"}}, {"RANK is not set", "LOCAL_RANK=0"}},
      {two_hosts, {"MASTER_ADDR is not set", "Open MPI"}},
      {Without(OpenMpi(), "OMPI_COMM_WORLD_SIZE"), {"OMPI_COMM_WORLD_SIZE is"}},
      {Without(OpenMpi(), "OMPI_COMM_WORLD_RANK"), {"OMPI_COMM_WORLD_RANK is"}},
      {With(OpenMpi(), {{"MASTER_ADDR", "host"}}), {"MASTER_PORT is not set"}},
      {Without(Slurm(), "SLURM_NTASKS"), {"SLURM_NTASKS is not set", "Slurm"}},
      {Without(Slurm(), "SLURM_PROCID"), {"SLURM_PROCID is not set"}},
      {Without(Slurm(), "SLURM_JOB_ID"), {"SLURM_JOB_ID is not set"}},
      {Without(Slurm(), "SLURM_JOB_NODELIST"), {"MASTER_ADDR"}},
      {With(Slurm(), {{"SLURM_PROCID", "7"}}), {"SLURM_PROCID=7"}},
      {With(Slurm(), {{"SLURM_LOCALID", "2"}}), {"SLURM_LOCALID=2"}},
      {With(Slurm(), {{"SLURM_NODEID", "4"}}), {"2(x3),1", "host 4"}},
      {With(Slurm(), {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}}), {"2(x"}},
      {Without(Replica(), "FSDP_REPLICA"),
       {"FSDP_REPLICA is not set", "variables of replicas are"}},
      {Without(Replica(), "FSDP_REPLICAS"), {"FSDP_REPLICAS is not set"}},
      {Without(Replica(), "FSDP_REPLICA_INCARNATION"),
       {"FSDP_REPLICA_INCARNATION is not set"}},
      {Without(Replica(), "FSDP_REPLICA_STORE"),
       {"FSDP_REPLICA_STORE is not set", "set all of them or none"}},
      {With(Replica(), {{"FSDP_REPLICA", "3"}}),
       {"FSDP_REPLICA=3", "less than FSDP_REPLICAS=3"}},
      {With(Replica(), {{"FSDP_REPLICA_INCARNATION", "0"}}),
       {"FSDP_REPLICA_INCARNATION=0", "at least 1"}},
      {Without(Mpi(), "MASTER_ADDR"), {"MASTER_ADDR is not set: MPI started"}},
      {Without(Mpi(), "MPI_LOCALNRANKS"), {"MPI_LOCALNRANKS is not set"}},
      {Without(Mpi(), "PMI_RANK"), {"PMI_RANK is not set"}},
      {With(Slurm(), {{"WORLD_SIZE", "4"}}),
       {"WORLD_SIZE=4", "SLURM_NTASKS=7"}},
  };
  for (const Refusal& refusal : refusals) {
    for (const std::string& part : refusal.message) {
      EXPECT_THAT(
          Read(refusal.map),
          StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(part)));
    }
  }
}

TEST(FirstSlurmHostTest, ReadsTheCompressedForm) {
  const Map hosts = {
      {"node[003-010,12]", "node003"},
      {"node7", "node7"},
      {"a,b,c", "a"},
      {"a[1,3]", "a1"},
      {"rack[0-1]-gpu[08-12],login", "rack0-gpu08"},
      {"n[1-2].cluster.org", "n1.cluster.org"},
      {"gpu-a-[5-7]", "gpu-a-5"},
  };
  for (const auto& [list, host] : hosts) {
    ASSERT_OK_AND_ASSIGN(std::string first, FirstSlurmHost(list));
    EXPECT_EQ(first, host) << list;
  }
}

TEST(FirstSlurmHostTest, RefusesWhatIsNoList) {
  for (const char* list : {"", ",", "node[", "node[]", "node]", "node[[1]]"}) {
    EXPECT_THAT(FirstSlurmHost(list),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(list), HasSubstr("expected"))));
  }
}

class UsableCoresTest : public ::testing::Test {
 protected:
  UsableCoresTest() {
    std::filesystem::remove_all(root_);
    Write("/proc/self/mountinfo",
          "31 24 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
          "32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct");
  }

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
