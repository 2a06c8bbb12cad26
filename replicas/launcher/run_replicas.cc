#include "replicas/launcher/run_replicas.h"

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/output_file.h"
#include "comm/run_ranks/run_ranks.h"
#include "replicas/launcher/launch_replicas.h"

namespace fsdp::replicas {
namespace {

// Returns whether this process starts replicas, instead of being part of one.
absl::StatusOr<bool> StartsReplicas(const comm::Environment& environment,
                                    const ReplicaCounts& counts) {
  if (counts.replicas < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RunReplicas: cannot start ", counts.replicas, " replicas"));
  }
  if (counts.replicas == 0) return false;
  const bool is_part = environment.started_by != comm::StartedBy::kNobody ||
                       environment.replicas > 0;
  if (is_part && counts.replicas != environment.replicas) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RunReplicas: ", counts.replicas,
        " replicas are asked for, but this process was started as a part of ",
        environment.replicas == 0
            ? absl::StrCat("a job without replicas, by ",
                           comm::Name(environment.started_by))
            : absl::StrCat(environment.replicas, " (FSDP_REPLICAS)")));
  }
  if (!is_part && counts.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("RunRanks: cannot start ", counts.ranks, " ranks"));
  }
  return !is_part;
}

}  // namespace

int RunReplicas(int argc, char** argv, const ReplicaCounts& counts,
                const ReplicaMain& fn, const comm::ConnectOptions& options,
                const comm::RestartOptions& restarts) {
  const FileSizeErrors errors;
  const absl::StatusOr<comm::Environment> environment =
      comm::ReadEnvironment(std::getenv);
  if (!environment.ok()) {
    return comm::TellEnd(environment.status(), /*local_rank=*/0);
  }
  const absl::StatusOr<bool> starts = StartsReplicas(*environment, counts);
  if (!starts.ok()) return comm::TellEnd(starts.status(), /*local_rank=*/0);
  if (!*starts) {
    return comm::RunRanks(
        argc, argv, counts.ranks,
        [&](std::shared_ptr<comm::Communicator> ranks) {
          return fn(std::move(ranks), *environment);
        },
        options, restarts);
  }
  const auto launch = comm::OptionsToLaunch(argc, argv, counts.ranks, restarts);
  if (!launch.ok()) return comm::TellEnd(launch.status(), /*local_rank=*/0);
  const SignalBlock no_reader(SIGPIPE);  // for what is printed here
  const auto report = LaunchReplicas(counts.replicas, *launch);
  if (!report.ok()) return comm::TellEnd(report.status(), /*local_rank=*/0);
  if (report->exit_code() != 0 || report->last_failed_replica >= 0) {
    std::cerr << report->ToString() << std::endl;
  }
  return report->exit_code();
}

}  // namespace fsdp::replicas
