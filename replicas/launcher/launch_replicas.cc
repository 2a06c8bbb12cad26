#include "replicas/launcher/launch_replicas.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/hmac.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/processes/child_process.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/rank_device.h"
#include "replicas/launcher/replicas_report.h"
#include "replicas/launcher/replicas_supervisor.h"

namespace fsdp::comm {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

// How much longer than its ranks a launcher may take to end.
constexpr absl::Duration kSlack = absl::Seconds(10);

absl::Status Check(int replicas, const LaunchOptions& options) {
  if (replicas < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("replicas is ", replicas, ": expected at least 1"));
  }
  if (options.restarts.on_restart) {
    return absl::InvalidArgumentError(
        "restarts.on_restart is set: a replica that is started again has as "
        "many ranks as the others");
  }
  return CheckLaunchOptions(options);
}

void Print(absl::string_view name, absl::string_view text) {
  const std::string lines =
      absl::StrReplaceAll(text, {{"\n", absl::StrCat("\n", name, ": ")}});
  std::fprintf(stderr, "%s\n", absl::StrCat(name, ": ", lines).c_str());
}

// A launcher with nothing but its replica, as a process of its own.
int RunLauncher(int replica, const LaunchOptions& options) {
  const std::string name = absl::StrCat("replica ", replica);
  const absl::StatusOr<LaunchReport> report = LaunchRanks(options);
  if (!report.ok()) {
    Print(name, report.status().ToString());
    return ExitCodeOf(report.status());
  }
  if (report->exit_code() != 0 || !report->failed_attempts.empty()) {
    Print(name, report->ToString());
  }
  return report->exit_code();
}

// Until it is killed.
int RunKeeper(UniqueFd listener, const std::string& secret) {
  const auto keeper = StartKeeper(std::move(listener), secret);
  if (keeper.ok()) {
    for (;;) pause();
  }
  std::fprintf(stderr, "%s\n", keeper.status().ToString().c_str());
  return EXIT_FAILURE;
}

// What all replicas have in common.
LaunchOptions OfEach(int replicas, const LaunchOptions& options, int port,
                     const std::string& secret) {
  LaunchOptions each = options;
  each.stdout_fd = STDOUT_FILENO;
  each.stderr_fd = STDERR_FILENO;
  auto& variables = each.environment;
  variables.emplace_back("FSDP_REPLICAS", absl::StrCat(replicas));
  variables.emplace_back("FSDP_REPLICA_INCARNATION", "1");
  variables.emplace_back("FSDP_REPLICA_STORE",
                         absl::StrCat(kLoopback, ":", port));
  variables.emplace_back("FSDP_JOB_SECRET", secret);
  if (FindVariable(options, "OMP_NUM_THREADS") == nullptr) {
    const int cores = UsableCores();
    variables.emplace_back(
        "OMP_NUM_THREADS",
        absl::StrCat(std::max(1, cores / replicas / options.ranks)));
  }
  return each;
}

std::string SecretOf(const LaunchOptions& options) {
  const char* secret = FindVariable(options, "FSDP_JOB_SECRET");
  return secret == nullptr || *secret == '\0'
             ? absl::BytesToHexString(RandomBytes(32))
             : secret;
}

absl::Status Annotated(const absl::Status& status, absl::string_view what) {
  return absl::Status(status.code(),
                      absl::StrCat(what, ": ", status.message()));
}

}  // namespace

absl::StatusOr<ReplicasReport> LaunchReplicas(int replicas,
                                              const LaunchOptions& options) {
  FSDP_RETURN_IF_ERROR(Check(replicas, options));
  const FileSizeErrors errors;
  FSDP_RETURN_IF_ERROR(OpenStandardStreams());
  FSDP_ASSIGN_OR_RETURN(SignalQueue signals, SignalQueue::Create());
  FSDP_ASSIGN_OR_RETURN(Listener listener, Listen(kLoopback, 0));
  const std::string secret = SecretOf(options);
  absl::StatusOr<ChildProcess> keeper = ChildProcess::Fork(
      [&] { return RunKeeper(std::move(listener.fd), secret); });
  if (!keeper.ok()) return Annotated(keeper.status(), "starting the keeper");
  // So that a dead keeper refuses connections.
  listener.fd.Reset();
  LaunchOptions each = OfEach(replicas, options, listener.port, secret);
  std::vector<ChildProcess> launchers;
  for (int replica = 0; replica < replicas; ++replica) {
    each.environment.emplace_back("FSDP_REPLICA", absl::StrCat(replica));
    absl::StatusOr<ChildProcess> launcher = ChildProcess::Fork(
        [replica, &each] { return RunLauncher(replica, each); });
    if (!launcher.ok()) {
      return Annotated(
          launcher.status(),
          absl::StrCat("starting replica ", replica, " of ", replicas));
    }
    launchers.push_back(*std::move(launcher));
  }
  // One period to end in, one for somebody to read what was printed.
  ReplicasSupervisor supervisor(
      {2 * options.stop_period + kSlack, options.stdout_fd, options.stderr_fd},
      &signals, *std::move(keeper), std::move(launchers));
  return supervisor.Run();
}

}  // namespace fsdp::comm
