#include "testing/gpt/train_program.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/agreement.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/inspection/inspection_signals.h"
#include "comm/launcher/launch_options.h"
#include "comm/launcher/launcher.h"
#include "comm/launcher/launcher_stop_request.h"
#include "comm/local/local_communicator.h"
#include "comm/run_ranks/run_ranks.h"
#include "comm/startup/environment.h"
#include "comm/testing/recording_communicator.h"
#include "comm/testing/staged/staged_communicator.h"
#include "replicas/launcher/run_replicas.h"
#include "replicas/replicas.h"
#include "testing/gpt/data/default_data.h"
#include "testing/gpt/data/text_corpus.h"
#include "testing/gpt/flags/flags.h"
#include "testing/gpt/flags/options.h"
#include "testing/gpt/flags/replica_options.h"
#include "testing/gpt/rank_program.h"
#include "testing/gpt/training/checkpoints.h"
#include "testing/gpt/training/trainer.h"

namespace gpt {
namespace {

using ::fsdp::comm::CollectiveLog;
using ::fsdp::comm::Communicator;
using ::fsdp::comm::DeviceChoice;
using ::fsdp::comm::Environment;
using ::fsdp::comm::NcclOn;
using ::fsdp::comm::StopRequest;
using ::fsdp::replicas::ReplicaCounts;

absl::StatusOr<std::shared_ptr<const TextCorpus>> ReadCorpus(
    const TrainOptions& options, const std::string& argv0) {
  if (options.data == kCountDataName) return nullptr;
  std::string path = options.data;
  if (path.empty()) {
    FSDP_ASSIGN_OR_RETURN(path, DefaultDataPath(argv0));
  }
  FSDP_ASSIGN_OR_RETURN(TextCorpus corpus,
                        ReadTextCorpus(path, options.model.seq + 1));
  return std::make_shared<const TextCorpus>(std::move(corpus));
}

struct Place {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int ranks_on_host = 1;
  const StopRequest& stop;
  absl::StatusOr<std::shared_ptr<const TextCorpus>> corpus;
  bool is_restarted = false;
  ReplicaHooks replica;
};

absl::Status RunOne(const TrainOptions& options, const Place& place,
                    std::unique_ptr<Communicator> communicator) {
  CollectiveLog log(/*max_trace=*/0);
  RankContext context;
  context.communicator = fsdp::comm::Record(std::move(communicator), &log);
  context.log = &log;
  context.device = place.device;
  context.ranks_on_host = place.ranks_on_host;
  context.corpus = place.corpus;
  context.is_restarted = place.is_restarted;
  context.replica = place.replica;
  context.out = &std::cout;
  context.columns = fsdp::comm::TerminalColumns();
  context.signal = [&place] { return place.stop.signal(); };
  return RunRank(options, context);
}

// Runs ranks as threads of this process.
absl::Status RunThreads(const TrainOptions& options, const StopRequest& stop,
                        const std::string& argv0) {
  FSDP_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group,
                        fsdp::comm::CreateLocalGroup(options.ranks));
  const Place place{
      c10::Device(c10::DeviceType::CPU), options.ranks,          stop,
      ReadCorpus(options, argv0),        /*is_restarted=*/false, {}};
  std::vector<absl::Status> results(group.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    auto thread = fsdp::StartThread("for a rank", [&, rank] {
      results[rank] = RunOne(options, place, std::move(group[rank]));
    });
    if (thread.ok()) {
      threads.push_back(*std::move(thread));
      continue;
    }
    results[rank] = thread.status();
    group[rank]->Abort(thread.status());
  }
  for (std::thread& thread : threads) thread.join();
  // Returns a failure that is not the echo of another one, if there is one.
  absl::Status first = absl::OkStatus();
  for (const absl::Status& result : results) {
    if (first.ok() || absl::IsAborted(first)) first = result;
  }
  return first;
}

fsdp::comm::Backend BackendOf(const TrainOptions& options) {
  switch (options.backend) {
    case Backend::kAuto:
      return fsdp::comm::Backend::kAuto;
    case Backend::kLocal:
      return fsdp::comm::Backend::kLocal;
    case Backend::kSharedMemory:
      return fsdp::comm::Backend::kSharedMemory;
    case Backend::kGloo:
      return fsdp::comm::Backend::kGloo;
  }
  return fsdp::comm::Backend::kAuto;
}

absl::StatusOr<DeviceChoice> DeviceChoiceOf(const TrainOptions& options,
                                            const Environment& environment,
                                            const NcclOn& nccl_on) {
  auto found = fsdp::comm::ChooseDevice(
      options.device == Device::kCuda ? c10::kCUDA : c10::kCPU, environment,
      options.staged ? fsdp::comm::StagedBackend : nccl_on);
  if (found.ok()) return found;
  return fsdp::Annotate(found.status(), "--device=cuda");
}

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
                        const std::string& argv0, const NcclOn& nccl_on,
                        const TrainHooks& hooks) {
  fsdp::comm::ConnectOptions connect;
  if (hooks.connecting) hooks.connecting(connect);
  connect.backend = BackendOf(options);
  FSDP_ASSIGN_OR_RETURN(const DeviceChoice device,
                        DeviceChoiceOf(options, environment, nccl_on));
  connect.device = device.connect;
  const auto signals =
      fsdp::comm::InspectionSignals::Install(environment.inspection_folder);
  if (!signals.ok()) std::cerr << signals.status() << std::endl;
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                        fsdp::comm::ConnectOrStop(environment, connect));
  connect.stop_requested = [&stop] { return stop.requested(); };
  if (signals.ok()) (*signals)->Show(*communicator);
  if (hooks.connected) communicator = hooks.connected(std::move(communicator));
  const Place place{device.device,
                    environment.local_world_size,
                    stop,
                    ReadCorpus(options, argv0),
                    environment.restart_count > 0,
                    ReplicaOf(options, environment, connect, hooks)};
  return RunOne(options, place, std::move(communicator));
}

fsdp::comm::RestartOptions RestartsOf(const TrainOptions& options) {
  fsdp::comm::RestartOptions restarts;
  restarts.max_restarts = options.max_restarts;
  restarts.min_ranks = options.min_ranks;
  if (options.restart_ranks == RestartRanks::kFewer) {
    restarts.on_restart = fsdp::comm::RanksLeft;
  }
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

// Starts this program once more for every rank.
int Launch(const TrainOptions& options, const ReplicaCounts& counts, int argc,
           char** argv) {
  if (options.max_restarts > 0) {
    // Restarted ranks take an export that is there for the job's own.
    const absl::Status exportable = CheckExport(options, options.ranks);
    if (!exportable.ok()) {
      return fsdp::comm::TellEnd(fsdp::comm::AsAgreed(exportable),
                                 /*local_rank=*/0);
    }
  }
  return fsdp::replicas::RunReplicas(argc, argv, counts, /*fn=*/nullptr, {},
                                     RestartsOf(options));
}

}  // namespace

int TrainProgram(int argc, char** argv, const NcclOn& nccl_on,
                 const TrainHooks& hooks) {
  const fsdp::FileSizeErrors errors;
  absl::SetProgramUsageMessage(
      "Trains a byte-level GPT with Fully Sharded Data Parallel.\n\n"
      "  bazel run //testing/gpt:train -- --data=my_text.txt --ranks=4");
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
  const bool starts_none = counts.replicas == 0 && options->max_restarts == 0;
  const bool is_alone = options->ranks == 1 && starts_none;
  const bool threads =
      starts_none && (options->backend == Backend::kLocal ||
                      (options->backend == Backend::kAuto && is_alone));
  const bool is_rank =
      environment->started_by != fsdp::comm::StartedBy::kNobody ||
      (is_alone &&
       (is_replica || options->device == Device::kCuda || !threads));
  // Ranks that are told to end save before they do.
  const StopRequest stop(options->save.empty() ? absl::Seconds(10)
                                               : absl::Minutes(2));
  if (!is_rank && !threads) return Launch(*options, counts, argc, argv);
  return fsdp::comm::TellEnd(is_rank ? RunProcess(*options, *environment, stop,
                                                  argv[0], nccl_on, hooks)
                                     : RunThreads(*options, stop, argv[0]),
                             environment->local_rank);
}

}  // namespace gpt
