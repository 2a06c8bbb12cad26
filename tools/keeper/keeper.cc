// Serves the store that outlives the replicas of a job on several hosts.
//   bazel run //tools/keeper -- --port=29400
#include <signal.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/command_line.h"
#include "base/status_macros.h"
#include "comm/meeting/store_server.h"
#include "comm/startup/bootstrap_socket.h"

ABSL_FLAG(int, port, 29400, "The port to listen on; 0: any that is free.");
ABSL_FLAG(std::string, address, "",
          "A loopback address, such as 127.0.0.1, to be reached from this host "
          "alone; default: listens on all interfaces.");
ABSL_FLAG(bool, insecure, false,
          "Serve without a secret whoever can reach the port.");

namespace fsdp::keeper {
namespace {

constexpr char kUsage[] =
    "Serves the store that outlives the replicas of a job: who takes part in "
    "which step, and where their ranks meet. It holds everything in memory; "
    "start an empty one for each job, and end it by SIGTERM or SIGINT when the "
    "job is over.\n\n"
    "  export FSDP_JOB_SECRET=$(openssl rand -hex 32)  # the same everywhere\n"
    "  bazel run //tools/keeper -- --port=29400        # on node1\n\n"
    "Then start each replica, of FSDP_REPLICAS=2, on its own host or hosts:\n\n"
    "  FSDP_REPLICA=0 FSDP_REPLICAS=2 FSDP_REPLICA_INCARNATION=1 \\\n"
    "  FSDP_REPLICA_STORE=node1:29400 train --ranks=8\n\n"
    "A replica that is started anew needs a higher FSDP_REPLICA_INCARNATION; "
    "restarts by --ranks and torchrun count by themselves. One host alone "
    "needs no keeper: there the program starts one (RunReplicas()).";

struct Settings {
  int port = 0;
  std::string address;
  std::string secret;
};

absl::StatusOr<Settings> ReadSettings(const std::vector<char*>& arguments) {
  Settings settings;
  settings.port = absl::GetFlag(FLAGS_port);
  settings.address = absl::GetFlag(FLAGS_address);
  const char* secret = std::getenv("FSDP_JOB_SECRET");
  if (secret != nullptr) settings.secret = secret;
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", arguments[1], "\": expected flags only; see --help"));
  }
  if (settings.port < 0 || settings.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("--port=", settings.port, ": expected 0 to 65535"));
  }
  if (!settings.address.empty() && !comm::IsLoopback(settings.address)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--address=", settings.address,
        ": expected a loopback address, or none for all interfaces"));
  }
  if (settings.secret.empty() && !absl::GetFlag(FLAGS_insecure)) {
    return absl::InvalidArgumentError(
        "FSDP_JOB_SECRET is not set: whoever can reach the port would be taken "
        "for a rank; set it, the same for all replicas, as to the output of "
        "`openssl rand -hex 32`, or say --insecure");
  }
  return settings;
}

std::string Greeting(const Settings& settings, int port) {
  const bool is_open = settings.address.empty();
  const bool has_colons = absl::StrContains(settings.address, ':');
  return absl::StrCat(
      "keeper: listens on port ", port,
      is_open ? " of all interfaces" : absl::StrCat(" of ", settings.address),
      settings.secret.empty() ? ", for anybody" : "", "; FSDP_REPLICA_STORE=",
      is_open      ? "<this host>"
      : has_colons ? absl::StrCat("[", settings.address, "]")
                   : settings.address,
      ":", port);
}

absl::Status Run(const Settings& settings) {
  // Signals are blocked before there is another thread, which would take them.
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  FSDP_ASSIGN_OR_RETURN(comm::Listener listener,
                        comm::Listen(settings.address, settings.port));
  FSDP_ASSIGN_OR_RETURN(
      const auto keeper,
      comm::StoreServer::Start(std::move(listener.fd), settings.secret));
  std::cout << Greeting(settings, listener.port) << std::endl;
  int signal = 0;
  sigwait(&ends, &signal);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  const absl::StatusOr<Settings> settings = ReadSettings(
      ParseCommandLine(argc, argv, kUsage, "tools/keeper/keeper.cc"));
  const absl::Status status =
      settings.ok() ? Run(*settings) : settings.status();
  if (status.ok()) return EXIT_SUCCESS;
  std::cerr << status << std::endl;
  return absl::IsInvalidArgument(status) ? 2 : EXIT_FAILURE;
}

}  // namespace
}  // namespace fsdp::keeper

int main(int argc, char** argv) { return fsdp::keeper::Main(argc, argv); }
