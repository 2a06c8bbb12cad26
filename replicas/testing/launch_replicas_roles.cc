#include "replicas/testing/launch_replicas_roles.h"

#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "comm/startup/environment.h"
#include "replicas/launcher/launch_replicas.h"
#include "replicas/store_registers.h"

namespace fsdp::replicas {
namespace {

using comm::Environment;
using comm::LaunchOptions;
using comm::ReadEnvironment;
using comm::StopRequest;

constexpr absl::Duration kLimit = absl::Seconds(20);

// A launcher sets it to tell the keeper that an incarnation has ended.
std::string GoneKey(int replica, int incarnation) {
  return absl::StrCat("gone/", replica, "/", incarnation);
}

Environment Self() { return ReadEnvironment(std::getenv).value(); }

void Print(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

int Wait() {
  for (;;) pause();
}

// Returns what the keeper has.
std::unique_ptr<StoreRegisters> Kept() {
  const Environment self = Self();
  return ValueOrThrow(
      StoreRegisters::Connect({self.keeper_addr, self.keeper_port, self.secret},
                              "replicas", {absl::Now() + kLimit}));
}

bool HasCome(const std::string& key) {
  return Kept()->Await(key, absl::Now() + kLimit / 2).ok();
}

bool IsThere(const std::string& key) { return Kept()->HasAll({key}).value(); }

bool Tell(const std::string& key) { return Kept()->Set(key, "1").ok(); }

// Each function is a role of a rank and returns the exit code.

int PrintPlace() {
  const Environment self = Self();
  Print(absl::StrCat("replica ", self.replica, " of ", self.replicas,
                     ", incarnation ", self.replica_incarnation, ", rank ",
                     self.rank, " of ", self.world_size, ", local ",
                     self.local_rank, " of ", self.local_world_size, ", store ",
                     self.keeper_addr));
  return self.keeper_port > 0 && self.keeper_port != self.master_port ? 0 : 100;
}

// Rank 1 of replica 1 is killed while the other rank of it lives. The other
// replica waits for the second incarnation, which does not begin before all
// have been told of the first one's end.
int KillOnce() {
  const Environment self = Self();
  PrintPlace();
  if (self.replica == 0) {
    return HasCome(GoneKey(1, 1)) && HasCome("again") ? 0 : 101;
  }
  if (self.replica_incarnation == 1)
    return self.rank == 1 ? raise(SIGKILL) : Wait();
  const bool told = IsThere(GoneKey(1, 1)) && !IsThere(GoneKey(1, 2)) &&
                    !IsThere(GoneKey(0, 1));
  return told && Tell("again") ? 0 : 102;
}

// Replica 0 hears of the end while a rank of replica 1 still runs.
int EndSlowly() {
  const Environment self = Self();
  if (self.replica == 0 && self.rank == 1) return 0;
  if (self.replica == 0) {
    const bool heard = HasCome(GoneKey(1, 1)) && !IsThere("over");
    return Tell("heard") && heard ? 0 : 103;
  }
  if (self.rank == 1) return 3;
  return HasCome("heard") && Tell("over") ? 4 : 104;
}

// Replica 1 fails each time; the other one goes on until replica 1 has been
// given up after three incarnations.
int Replica1ExitsWith3() {
  if (Self().replica == 1) return 3;
  return HasCome(GoneKey(1, 3)) ? 0 : 105;
}

// Returns the launcher of this rank's launcher.
pid_t Grandparent() {
  std::ifstream file(absl::StrCat("/proc/", getppid(), "/stat"));
  std::string number, name, state;
  pid_t parent = 0;
  file >> number >> name >> state >> parent;
  return parent;
}

// Replica 1 ends once the launcher has seen the end of replica 0, and has
// nobody left but the keeper and this one.
int AllFail() {
  if (Self().replica == 0) return 3;
  const absl::Time deadline = absl::Now() + kLimit;
  while (ChildrenOf(Grandparent()).size() > 2 && absl::Now() < deadline) {
    poll(nullptr, 0, 1);
  }
  return 4;
}

// The only replica fails until its second attempt.
int FailOnce() {
  const Environment self = Self();
  PrintPlace();
  if (self.restart_count == 0) return 3;
  return IsThere(GoneKey(self.replica, self.replica_incarnation - 1)) ? 0 : 107;
}

// Prints more than a pipe takes.
int PrintMuch() {
  const std::string line(99, 'a');
  for (int i = 0; i < 2000; ++i) std::printf("%s\n", line.c_str());
  return 0;
}

// Trains steps of 1 ms and stops when told to.
int Train() {
  const StopRequest stop;
  Print("ready");
  while (!stop.requested()) poll(nullptr, 0, 1);
  Print(absl::StrCat("stopped by ", stop.signal()));
  return 128 + stop.signal();
}

// Says that it hears a signal, and goes on.
int Hear(int number) {
  signal(number, [](int) {
    const ssize_t written = write(STDOUT_FILENO, "heard\n", 6);
    static_cast<void>(written);
  });
  Print("ready");
  return Wait();
}

int LaunchTwo() {
  LaunchOptions options = TwoRanks(std::getenv(kRankRole));
  // A rank's own standard error is a pipe that nobody reads in these tests.
  options.stderr_fd = 1;
  const absl::StatusOr<ReplicasReport> report = LaunchReplicas(2, options);
  if (!report.ok()) return 110;
  Print(report->ToString());
  return report->exit_code();
}

const std::map<std::string, std::function<int()>>& Roles() {
  static const auto& roles = *new std::map<std::string, std::function<int()>>{
      {"print_place", PrintPlace},
      {"print_secret",
       [] {
         Print(Self().secret);
         return 0;
       }},
      {"print_cores",
       [] {
         Print(std::getenv("OMP_NUM_THREADS"));
         return 0;
       }},
      {"kill_once", KillOnce},
      {"end_slowly", EndSlowly},
      {"replica_1_exits_with_3", Replica1ExitsWith3},
      {"all_fail", AllFail},
      {"fail_once", FailOnce},
      {"print_much", PrintMuch},
      {"train", Train},
      {"refuse_to_stop", [] { return Hear(SIGINT); }},
      {"answer_questions", [] { return Hear(SIGQUIT); }},
      {"wait",
       [] {
         Print("ready");
         return Wait();
       }},
      {"launch_two", LaunchTwo},
  };
  return roles;
}

}  // namespace

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/task/", pid, "/children"));
  std::vector<pid_t> children;
  for (pid_t child; file >> child;) children.push_back(child);
  return children;
}

LaunchOptions TwoRanks(const std::string& role) {
  LaunchOptions options;
  options.ranks = 2;
  options.argv = {"launch_replicas_test"};
  options.environment = {{kReplicaRole, role}};
  options.grace_period = absl::Milliseconds(100);
  options.stop_period = absl::Seconds(60);
  options.signals_apart = absl::ZeroDuration();
  options.terminate_period = kLimit;
  options.restarts.max_without_progress = 10;
  options.restarts.pause = absl::Milliseconds(1);
  return options;
}

std::optional<int> PlayReplicaRole() {
  const char* role = std::getenv(kReplicaRole);
  if (role == nullptr) return std::nullopt;
  return Roles().at(role)();
}

}  // namespace fsdp::replicas
