#include "comm/run_ranks/run_ranks.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/launcher/launcher.h"
#include "comm/local/local_communicator.h"

namespace fsdp::comm {
namespace {

// The time for which a rank that is told to stop goes on connecting: the
// others, which may know of no signal, would wait for one that has left.
constexpr absl::Duration kStay = absl::Seconds(5);

int Print(const absl::Status& status) {
  return TellEnd(status, /*local_rank=*/0);
}

absl::Status NeedsNccl(int ranks, c10::Device device) {
  return absl::FailedPreconditionError(absl::StrCat(
      ranks, " ranks on ", device.str(),
      " need NCCL, and this program was linked without it: build it with "
      "--config=cuda, as a program that is linked with it (train_cuda of the "
      "examples), or take one rank"));
}

// For a rank that has no others, neither in its job nor in replicas of it.
ConnectDevice OnlyRank(c10::Device device) {
  return [device](const DeviceMeeting& meeting) -> CreatedCommunicator {
    const int met = meeting.host.world_size();
    if (met > 1) return NeedsNccl(met, device);
    FSDP_ASSIGN_OR_RETURN(
        auto ranks,
        CreateLocalGroup(/*world_size=*/1, {meeting.timeout, {}, device}));
    return std::move(ranks[0]);
  };
}

int Launch(int argc, char** argv, int ranks, const RestartOptions& restarts) {
  const absl::StatusOr<LaunchOptions> options =
      OptionsToLaunch(argc, argv, ranks, restarts);
  if (!options.ok()) return Print(options.status());
  const SignalBlock no_reader(SIGPIPE);  // for what is printed here
  const auto report = LaunchRanks(*options);
  if (!report.ok()) return Print(report.status());
  if (report->exit_code() != 0 || !report->failed_attempts.empty()) {
    std::cerr << report->ToString() << std::endl;
  }
  return report->exit_code();
}

absl::Status RunRank(const Environment& environment, const RankMain& fn,
                     const ConnectOptions& options) {
  // Must come before connecting, which may take long. A program that answers
  // these signals itself goes on doing so.
  const auto signals = InspectionSignals::Install(
      options.inspection_folder.empty() ? environment.inspection_folder
                                        : options.inspection_folder);
  if (!signals.ok()) std::cerr << signals.status() << std::endl;
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> ranks,
                        ConnectOrStop(environment, options));
  if (signals.ok()) (*signals)->Show(*ranks);
  absl::Status result =
      TorchToStatus("an exception", [&] { return fn(ranks); });
  // Must come before `ranks` is destroyed, which would tell the others less. If
  // all return alike nobody waits, and some may still have to hear of it.
  const bool is_alone = !absl::IsCancelled(result) && !IsAgreed(result);
  if (!result.ok() && is_alone) ranks->Abort(result);
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> ConnectOrStop(
    const Environment& environment, ConnectOptions options) {
  const StopRequest* const stop = StopRequest::Current();
  if (stop == nullptr || options.stop_requested) {
    return Connect(environment, options);
  }
  absl::Time until = absl::InfiniteFuture();
  options.stop_requested = [stop, &until] {
    if (stop->requested()) until = std::min(until, absl::Now() + kStay);
    return absl::Now() >= until;
  };
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> ranks,
                        Connect(environment, options));
  FSDP_ASSIGN_OR_RETURN(const double all, Max(*ranks, stop->signal()));
  const int signal = static_cast<int>(all);
  if (signal == 0) return ranks;
  return AsAgreed(StoppedError(
      signal,
      absl::StrCat("stopped by ", SignalText(signal), " before it began")));
}

int TellEnd(absl::Status status, int local_rank) {
  if (status.ok() && !std::cout.flush()) {
    status = absl::ResourceExhaustedError(
        "not all could be printed: is the disk full that standard output goes "
        "to?");
  }
  const bool is_told_elsewhere = absl::IsAborted(status) || IsAgreed(status);
  if (!status.ok() && (local_rank == 0 || !is_told_elsewhere)) {
    std::cerr << status.ToString(absl::StatusToStringMode::kWithNoExtraData)
              << std::endl;
  }
  const bool would_fail_again =
      IsAgreed(status) &&
      (absl::IsNotFound(status) || absl::IsAlreadyExists(status) ||
       absl::IsPermissionDenied(status) || absl::IsFailedPrecondition(status));
  if (would_fail_again) return kUsageErrorExitCode;
  const StopRequest* const stop = StopRequest::Current();
  if (stop == nullptr || !stop->requested()) return ExitCodeOf(status);
  if (status.ok()) {
    std::cerr << SignalText(stop->signal())
              << " came too late to stop a run that has come to its end"
              << std::endl;
  }
  return absl::IsCancelled(status) ? 128 + stop->signal() : ExitCodeOf(status);
}

absl::StatusOr<LaunchOptions> OptionsToLaunch(int argc, char** argv, int ranks,
                                              const RestartOptions& restarts) {
  IgnoreQuestions();
  LaunchOptions launch;
  launch.restarts = restarts;
  launch.ranks = ranks;
  launch.argv.assign(argv, argv + argc);
  const StopRequest* const stop = StopRequest::Current();
  if (stop == nullptr) return launch;
  launch.stop_period = stop->period();
  launch.ends_by_usr1 = true;
  // From here on the launcher takes SIGUSR1.
  signal(SIGUSR1, SIG_IGN);
  if (stop->requested()) {
    return StoppedError(stop->signal(), "stopped before it began");
  }
  return launch;
}

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
  const bool is_alone = ranks == 1 && restarts.max_restarts == 0;
  if (!is_rank && !is_alone) return Launch(argc, argv, ranks, restarts);
  return TellEnd(RunRank(*environment, fn, options), environment->local_rank);
}

absl::StatusOr<c10::Device> DeviceOfRank(c10::DeviceType type, int local_rank) {
  if (type == c10::DeviceType::CPU) return c10::Device(type);
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  if (!c10::impl::hasDeviceGuardImpl(type)) {
    return absl::FailedPreconditionError(
        absl::StrCat("this program was built without support for ", name,
                     " devices; for GPUs build with --config=cuda and link "
                     "//third_party/libtorch:cuda"));
  }
  const c10::DeviceIndex count =
      c10::impl::getDeviceGuardImpl(type)->deviceCount();
  if (count > 0) {
    return c10::Device(type, static_cast<c10::DeviceIndex>(local_rank % count));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("this process sees 0 ", name,
                   " devices; is there one, does its driver run, and does "
                   "CUDA_VISIBLE_DEVICES, where it is set, name it?"));
}

absl::StatusOr<DeviceChoice> ChooseDevice(c10::DeviceType type,
                                          const Environment& environment,
                                          const NcclOn& nccl_on) {
  DeviceChoice found;
  FSDP_ASSIGN_OR_RETURN(found.device,
                        DeviceOfRank(type, environment.local_rank));
  if (type == c10::DeviceType::CPU) return found;
  if (nccl_on) {
    found.connect = nccl_on(found.device);
  } else if (environment.world_size == 1) {
    found.connect = OnlyRank(found.device);
  } else {
    return NeedsNccl(environment.world_size, found.device);
  }
  return found;
}

absl::StatusOr<DeviceChoice> ChooseDeviceOfProcess(c10::DeviceType type,
                                                   int ranks,
                                                   const NcclOn& nccl_on) {
  FSDP_ASSIGN_OR_RETURN(const Environment environment,
                        ReadEnvironment(std::getenv));
  const bool is_rank =
      environment.started_by != StartedBy::kNobody || ranks == 1;
  return ChooseDevice(is_rank ? type : c10::DeviceType::CPU, environment,
                      nccl_on);
}

}  // namespace fsdp::comm
