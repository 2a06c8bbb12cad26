#include "comm/run_ranks/run_ranks.h"

#include <cstdlib>
#include <iostream>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/file_size_errors.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/inspection/inspection_signals.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/launcher_report.h"
#include "comm/launcher/restart_options.h"
#include "comm/startup/environment.h"

namespace fsdp::comm {
namespace {

int Print(const absl::Status& status) {
  if (!status.ok()) std::cerr << status << std::endl;
  return ExitCodeOf(status);
}

int Launch(int argc, char** argv, int ranks, const RestartOptions& restarts) {
  LaunchOptions launch;
  launch.restarts = restarts;
  launch.ranks = ranks;
  launch.argv.assign(argv, argv + argc);
  const absl::StatusOr<LaunchReport> report = LaunchRanks(launch);
  if (!report.ok()) return Print(report.status());
  if (report->exit_code() != 0 || !report->failed_attempts.empty()) {
    std::cerr << report->ToString() << std::endl;
  }
  return report->exit_code();
}

absl::Status RunRank(const Environment& environment, const RankMain& fn,
                     const ConnectOptions& options) {
  // Before connecting, which may take long; a program that answers these
  // signals itself goes on doing so.
  const auto signals = InspectionSignals::Install(
      options.inspection_folder.empty() ? environment.inspection_folder
                                        : options.inspection_folder);
  if (!signals.ok()) std::cerr << signals.status() << std::endl;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> ranks,
                        Connect(environment, options));
  if (signals.ok()) (*signals)->Show(*ranks);
  absl::Status result;
  const absl::Status thrown =
      TorchToStatus("an exception", [&] { result = fn(ranks); });
  if (!thrown.ok()) result = thrown;
  // Before it is destroyed, which would tell the others less.
  if (!result.ok()) ranks->Abort(result);
  return result;
}

}  // namespace

int RunRanks(int argc, char** argv, int ranks, const RankMain& fn,
             const ConnectOptions& options, const RestartOptions& restarts) {
  const FileSizeErrors errors;
  const absl::StatusOr<Environment> environment = ReadEnvironment(std::getenv);
  if (!environment.ok()) return Print(environment.status());
  const bool is_rank = environment->started_by != StartedBy::kNobody;
  if (!is_rank && ranks < 1) {
    return Print(absl::InvalidArgumentError(
        absl::StrCat("RunRanks: cannot start ", ranks, " ranks")));
  }
  if (!is_rank && (ranks > 1 || restarts.max_restarts > 0)) {
    return Launch(argc, argv, ranks, restarts);
  }
  return Print(RunRank(*environment, fn, options));
}

}  // namespace fsdp::comm
