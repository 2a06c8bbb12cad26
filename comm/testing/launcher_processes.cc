#include "comm/testing/launcher_processes.h"

#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {
namespace {

// Each function is a role and returns the exit code.

int Rank() { return std::atoi(std::getenv("RANK")); }

int Print() {
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  if (!environment.ok()) return 100;
  std::printf("rank %d of %d\n", environment->rank, environment->world_size);
  std::fprintf(stderr, "local rank %d from %s\n", environment->local_rank,
               std::string(Name(environment->started_by)).c_str());
  return 0;
}

int PrintSecret() {
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  if (!environment.ok()) return 100;
  std::printf("%s\n", environment->secret.c_str());
  return 0;
}

int Wait() {
  for (;;) pause();
}

// Waits for longer than the launcher takes for simultaneous.
void LetHalfASecondPass() { poll(nullptr, 0, 600); }

int Rank1ExitsWith3() { return Rank() == 1 ? 3 : Wait(); }

// Both ranks go on once both have come: opening a FIFO waits for its other end.
UniqueFd MeetRank1() {
  return UniqueFd(open(std::getenv(kFifo), Rank() == 1 ? O_WRONLY : O_RDONLY));
}

int Rank0ExitsRank1IsStopped() {
  const UniqueFd fifo = MeetRank1();
  if (Rank() == 0) return 4;
  raise(SIGSTOP);
  return Wait();
}

int Rank0ExitsRank1IgnoresSigterm() {
  if (Rank() == 1) signal(SIGTERM, SIG_IGN);
  const UniqueFd fifo = MeetRank1();
  return Rank() == 0 ? 5 : Wait();
}

// Rank 0 notices that rank 1 has gone, says so and ends by itself.
int Rank1IsKilledRank0Reports() {
  const UniqueFd fifo = MeetRank1();
  if (Rank() == 1) raise(SIGKILL);
  char byte;
  if (read(fifo.get(), &byte, 1) == 0) std::printf("rank 1 is gone\n");
  return 1;
}

// Rank 0 ends when it hears of the failure, rank 1 some time after that.
int Rank1FailsAndRank0EndsBefore() {
  UniqueFd fifo = MeetRank1();
  if (Rank() == 0) return kPeerFailedExitCode;
  pollfd other_end = {fifo.get(), 0, 0};
  poll(&other_end, 1, -1);
  LetHalfASecondPass();
  return 6;
}

int BothAreToldOfAFailure() { return kPeerFailedExitCode; }

int PrintMuch() {
  const std::string line(kLineBytes - 1, static_cast<char>('a' + Rank()));
  for (int i = 0; i < kLines; ++i) std::printf("%s\n", line.c_str());
  return 0;
}

// Holds the FIFO until all is printed.
int PrintMuchAndFail() {
  const UniqueFd fifo(open(std::getenv(kFifo), O_WRONLY));
  PrintMuch();
  std::fflush(stdout);
  return 7;
}

// Leaves a process behind that holds the output and a FIFO.
int LeaveGrandchild() {
  const UniqueFd fifo(open(std::getenv(kFifo), O_WRONLY));
  return fork() == 0 ? Wait() : 0;
}

int HoldFifo() {
  const UniqueFd fifo(open(std::getenv(kFifo), O_WRONLY));
  std::printf("ready\n");
  std::fflush(stdout);
  return Wait();
}

// A training loop of 1 ms steps that stops when told to.
int Train() {
  const StopRequest stop;
  std::printf("ready\n");
  std::fflush(stdout);
  while (!stop.requested()) poll(nullptr, 0, 1);
  std::printf("stopped by %d\n", stop.signal());
  return 128 + stop.signal();
}

// The rank is told to stop before it has a handler.
int TrainLate() {
  raise(SIGUSR1);
  return Train();
}

int RefuseToStop() {
  signal(SIGINT, [](int) {
    const ssize_t written = write(STDOUT_FILENO, "no\n", 3);
    static_cast<void>(written);
  });
  std::printf("ready\n");
  std::fflush(stdout);
  return Wait();
}

// The port is this rank's and open before rank 0 has done anything.
int UseThePort() {
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  if (!environment.ok()) return 100;
  const int port = environment->master_port;
  if (environment->rank == 0) {
    return AdoptListener(environment->listen_fd, port).ok() ? 0 : 101;
  }
  // Rank 0 may have closed it again.
  return environment->listen_fd == -1 && port > 0 ? 0 : 102;
}

int Restart() {
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  return environment.ok() ? environment->restart_count : -1;
}

// Rank 1 fails until the second restart, as long as there is a rank 1.
int FailTwice() {
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  if (!environment.ok()) return 100;
  const int restart = environment->restart_count;
  if (Rank() != 1 && restart < 2 && environment->world_size > 1) return Wait();
  std::printf("rank %d of %d, restart %d of %d\n", environment->rank,
              environment->world_size, restart, environment->max_restarts);
  return Rank() == 1 && restart < 2 ? 3 : 0;
}

// Rank 1 says that it would fail again.
int Rank1IsAskedTooMuch() { return Rank() == 1 ? kUsageErrorExitCode : Wait(); }

int UseThePortAfterAFailure() { return Restart() == 0 ? 3 : UseThePort(); }

// The first attempt leaves a process behind that holds the FIFO; the second one
// tells whether anybody does.
int LeaveGrandchildAndFail() {
  if (Restart() == 0) {
    LeaveGrandchild();
    return 3;
  }
  const UniqueFd fifo(open(std::getenv(kFifo), O_RDONLY | O_NONBLOCK));
  char byte;
  // A killed process may take a moment to end.
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (absl::Now() < deadline) {
    if (read(fifo.get(), &byte, 1) == 0) return 0;
    poll(nullptr, 0, 1);
  }
  return 104;
}

void ReadRestarts(LaunchOptions& options) {
  const char* restarts = std::getenv(kMaxRestarts);
  if (restarts == nullptr) return;
  options.restarts.max_restarts = std::atoi(restarts);
  options.restarts.pause = options.restarts.longest_pause = absl::Hours(1);
  options.grace_period = absl::ZeroDuration();
  options.stderr_fd = 1;
}

int LaunchTwo() {
  const char* ignored = std::getenv(kIgnoredSignal);
  if (ignored != nullptr) signal(std::atoi(ignored), SIG_IGN);
  LaunchOptions options;
  options.ranks = 2;
  options.argv = {"launcher_test"};
  options.environment = {{kRole, std::getenv(kNestedRole)}};
  options.stop_period = absl::Seconds(60);
  options.signals_apart = absl::ZeroDuration();
  ReadRestarts(options);
  const absl::StatusOr<LaunchReport> report = LaunchRanks(options);
  return report.ok() ? report->exit_code() : 103;
}

const std::map<std::string, std::function<int()>>& Roles() {
  static const auto& roles = *new std::map<std::string, std::function<int()>>{
      {"print", Print},
      {"print_secret", PrintSecret},
      {"rank_1_exits_with_3", Rank1ExitsWith3},
      {"rank_1_is_stopped", Rank0ExitsRank1IsStopped},
      {"rank_1_ignores_sigterm", Rank0ExitsRank1IgnoresSigterm},
      {"rank_1_is_killed", Rank1IsKilledRank0Reports},
      {"rank_1_fails_after_its_echo", Rank1FailsAndRank0EndsBefore},
      {"both_are_told_of_a_failure", BothAreToldOfAFailure},
      {"print_much_and_fail", PrintMuchAndFail},
      {"print_much", PrintMuch},
      {"hold_fifo", HoldFifo},
      {"train", Train},
      {"train_late", TrainLate},
      {"refuse_to_stop", RefuseToStop},
      {"fail_twice", FailTwice},
      {"rank_1_is_asked_too_much", Rank1IsAskedTooMuch},
      {"use_the_port_after_a_failure", UseThePortAfterAFailure},
      {"leave_grandchild_and_fail", LeaveGrandchildAndFail},
      {"launch_two", LaunchTwo},
  };
  return roles;
}

}  // namespace

std::optional<int> PlayRole() {
  const char* role = std::getenv(kRole);
  if (role == nullptr) return std::nullopt;
  return Roles().at(role)();
}

}  // namespace fsdp::comm
