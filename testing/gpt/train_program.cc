#include "testing/gpt/train_program.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"
#include "comm/testing/recording_communicator.h"
#include "replicas/launcher/run_replicas.h"
#include "testing/gpt/options.h"
#include "testing/gpt/rank_program.h"
#include "testing/gpt/trainable_model.h"

namespace gpt {
namespace {

using ::fsdp::comm::CollectiveLog;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::Environment;
using ::fsdp::comm::NcclOn;
using ::fsdp::comm::StopRequest;
using ::fsdp::replicas::ReplicaCounts;

// Replicas are connected by `between`.
ReplicaHooks ReplicaOf(const TrainOptions& options,
                       const Environment& environment,
                       const fsdp::comm::ConnectOptions& between,
                       const TrainHooks& hooks) {
  ReplicaHooks replica;
  if (environment.replicas == 0) return replica;
  fsdp::ReplicaOptions joining;
  joining.history_folder = options.replica_history;
  joining.replay = options.replica_replay;
  joining.between = between;
  // A replica without a checkpoint must not begin before one with a checkpoint
  // has loaded it.
  if (options.resume) joining.found_timeout = absl::Minutes(10);
  if (hooks.joining) hooks.joining(joining);
  replica.number = environment.replica;
  replica.join = [joining, environment](fsdp::checkpoint::TrainingRun* run,
                                        int64_t steps, int64_t done) mutable {
    joining.steps = steps;
    joining.first_step = done;
    return fsdp::Replicas::Join(environment, run, joining);
  };
  return replica;
}

// Runs this process as the only rank or as one that somebody has started.
absl::Status RunProcess(const TrainOptions& options,
                        const Environment& environment, const StopRequest& stop,
                        const NcclOn& nccl_on, const TrainHooks& hooks) {
  fsdp::comm::ConnectOptions connect;
  if (hooks.connecting) hooks.connecting(connect);
  connect.backend = options.backend;
  const auto device =
      fsdp::comm::ChooseDevice(options.device, environment, nccl_on);
  if (!device.ok()) return fsdp::Annotate(device.status(), "--device=cuda");
  connect.device = device->connect;
  const auto signals =
      fsdp::comm::InspectionSignals::Install(environment.inspection_folder);
  if (!signals.ok()) std::cerr << signals.status() << std::endl;
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                        fsdp::comm::ConnectOrStop(environment, connect));
  connect.stop_requested = [&stop] { return stop.requested(); };
  if (signals.ok()) (*signals)->Show(*communicator);
  if (hooks.connected) communicator = hooks.connected(std::move(communicator));
  RankContext place;
  place.device = device->device;
  place.ranks_on_host = environment.local_world_size;
  place.signal = [&stop] { return stop.signal(); };
  place.is_restarted = environment.restart_count > 0;
  place.replica = ReplicaOf(options, environment, connect, hooks);
  CollectiveLog log(/*max_trace=*/0);
  place.communicator = fsdp::comm::Record(std::move(communicator), &log);
  place.log = &log;
  return RunRank(options, place);
}

fsdp::comm::RestartOptions RestartsOf(const TrainOptions& options) {
  fsdp::comm::RestartOptions restarts;
  restarts.max_restarts = options.max_restarts;
  if (options.restart_fewer) restarts.on_restart = fsdp::comm::RanksLeft;
  // What others train meanwhile is not a replica's own progress.
  if (options.replicas > 0) {
    restarts.max_without_progress = restarts.max_restarts + 1;
    return restarts;
  }
  if (options.save.empty()) return restarts;
  restarts.progress = [folder = options.save]() -> int64_t {
    const absl::StatusOr<std::optional<int64_t>> newest =
        fsdp::checkpoint::NewestStep(folder);
    return newest.ok() ? newest->value_or(-1) : -1;
  };
  return restarts;
}

}  // namespace

int TrainProgram(int argc, char** argv, const NcclOn& nccl_on,
                 const TrainHooks& hooks) {
  const fsdp::FileSizeErrors errors;
  absl::StatusOr<TrainOptions> options = ParseFlags(argc, argv);
  const absl::StatusOr<Environment> environment =
      fsdp::comm::ReadEnvironment(std::getenv);
  if (options.ok() && environment.ok()) {
    options = OptionsOfReplica(*std::move(options), *environment);
  }
  for (const absl::Status& status : {options.status(), environment.status()}) {
    if (status.ok()) continue;
    std::cerr << status << std::endl;
    return fsdp::comm::ExitCodeOf(status);
  }
  const bool is_replica = environment->replicas > 0;
  const ReplicaCounts counts{is_replica ? 0 : options->replicas,
                             options->ranks};
  const bool is_alone =
      options->ranks == 1 && counts.replicas == 0 && options->max_restarts == 0;
  const bool is_rank =
      environment->started_by != fsdp::comm::StartedBy::kNobody || is_alone;
  // Ranks that are told to end save before they do.
  const StopRequest stop(options->save.empty() ? absl::Seconds(10)
                                               : absl::Minutes(2));
  if (!is_rank) {
    // Restarted ranks take an export that is there for the job's own.
    const absl::Status exportable = options->max_restarts > 0
                                        ? CheckExport(*options, options->ranks)
                                        : absl::OkStatus();
    if (!exportable.ok()) {
      return fsdp::comm::TellEnd(fsdp::comm::AsAgreed(exportable),
                                 /*local_rank=*/0);
    }
    return fsdp::replicas::RunReplicas(argc, argv, counts, /*fn=*/nullptr, {},
                                       RestartsOf(*options));
  }
  return fsdp::comm::TellEnd(
      RunProcess(*options, *environment, stop, nccl_on, hooks),
      environment->local_rank);
}

}  // namespace gpt
