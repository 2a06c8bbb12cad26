#include "testing/gpt/rank_program.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/DeviceGuard.h>
#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/model_files.h"
#include "comm/agreement.h"
#include "comm/launcher/launch_options.h"
#include "comm/startup/environment.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/resting/offload_space.h"
#include "fsdp/trace/trace.h"
#include "testing/gpt/batches.h"
#include "testing/gpt/model.h"
#include "testing/gpt/report.h"
#include "testing/gpt/trainable_model.h"

namespace gpt {
namespace {

using ::fsdp::comm::Collective;
using ::fsdp::comm::Communicator;

// How often it looks whether another replica has written the model.
constexpr absl::Duration kExportPause = absl::Milliseconds(100);
constexpr absl::Duration kShowInterval = absl::Seconds(10);

// Returns `mine` of each rank, by rank. Collective; all pass equally many.
absl::StatusOr<std::vector<std::vector<int64_t>>> GatherNumbers(
    const std::vector<int64_t>& mine, absl::string_view label,
    Communicator& communicator) {
  const int64_t count = static_cast<int64_t>(mine.size());
  const at::Tensor all =
      at::empty({communicator.world_size() * count}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(
      std::unique_ptr<fsdp::comm::Work> work,
      communicator.AllGather(all, at::tensor(mine, at::kLong), label));
  FSDP_RETURN_IF_ERROR(
      work->Wait(absl::Now() + communicator.default_timeout()));
  const int64_t* next = all.const_data_ptr<int64_t>();
  std::vector<std::vector<int64_t>> by_rank;
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    by_rank.emplace_back(next, next + count);
    next += count;
  }
  return by_rank;
}

// Is one rank's run: it has the steps of RunRank() as methods, in their order.
class RankRun {
 public:
  RankRun(const TrainOptions& options, const RankContext& context)
      : options_(options),
        context_(context),
        communicator_(*context.communicator) {}

  absl::Status Run() {
    FSDP_RETURN_IF_ERROR(Agree(OpenOutputs(), "opening files to write"));
    FSDP_ASSIGN_OR_RETURN(checkpoints_,
                          OpenCheckpoints(options_, context_.communicator));
    FSDP_RETURN_IF_ERROR(MakeModel());
    FSDP_RETURN_IF_ERROR(TrainModel());
    if (result_.finished) FSDP_RETURN_IF_ERROR(Export());
    FSDP_RETURN_IF_ERROR(GatherPeakMemory());
    FSDP_RETURN_IF_ERROR(Agree(PublishReport(), "writing the report"));
    return result_.stopped;
  }

 private:
  bool IsFirst() const { return communicator_.rank() == 0; }

  absl::Status Agree(const absl::Status& mine, absl::string_view what) {
    return fsdp::comm::Agree(communicator_, mine, what,
                             absl::Now() + communicator_.default_timeout());
  }

  // Comes before anything that takes time.
  absl::Status OpenOutputs() {
    if (!IsFirst()) return absl::OkStatus();
    if (!context_.is_restarted) {
      const absl::Status free =
          CheckExport(options_, communicator_.world_size());
      // Another replica may look at the same time.
      const bool is_watched =
          context_.replica.join && absl::IsFailedPrecondition(free);
      if (!is_watched) FSDP_RETURN_IF_ERROR(free);
    }
    if (!options_.json.empty()) {
      FSDP_ASSIGN_OR_RETURN(fsdp::OutputFile file,
                            fsdp::OutputFile::Open(options_.json));
      json_.emplace(std::move(file));
    }
    if (options_.trace.empty()) return absl::OkStatus();
    FSDP_ASSIGN_OR_RETURN(fsdp::OutputFile file,
                          fsdp::OutputFile::Open(options_.trace));
    trace_.emplace(std::move(file));
    return absl::OkStatus();
  }

  // An attempt before this one may have written the model already.
  absl::Status Export() {
    if (options_.export_dir.empty()) return absl::OkStatus();
    if (context_.replica.join) return ExportOnce();
    std::error_code ignored;
    const bool is_there = context_.is_restarted && IsFirst() &&
                          std::filesystem::exists(options_.export_dir, ignored);
    FSDP_ASSIGN_OR_RETURN(const double done,
                          fsdp::comm::Max(communicator_, is_there ? 1 : 0));
    if (done > 0) return absl::OkStatus();
    return ExportTrained(options_, model_, communicator_);
  }

  // All replicas have the same bits. The first one writes them; the others stay
  // until they are written, since the first one may be lost before that.
  absl::Status ExportOnce() {
    // Tries are counted, since ranks would differ by the clock.
    auto tries = communicator_.default_timeout() / kExportPause;
    absl::Status status = ExportTrained(options_, model_, communicator_);
    while (absl::IsFailedPrecondition(status) && tries-- > 0) {
      absl::SleepFor(kExportPause);
      status = ExportTrained(options_, model_, communicator_);
    }
    return absl::IsAlreadyExists(status) ? absl::OkStatus() : status;
  }

  // Makes a model without values, unless every rank has all of it: sharding
  // gives it values on its device, so that no rank ever holds all.
  absl::Status InitializeModel(Gpt& model) {
    const absl::Status made = fsdp::TorchToStatus("making the model", [&] {
      const fsdp::DeferredInit deferred;
      model = Gpt(options_.model);
      InitializeParameters(*model, options_.seed);
      model->to(context_.device);
    });
    FSDP_RETURN_IF_ERROR(Agree(made, "making the model"));
    if (options_.sharding.has_value()) return absl::OkStatus();
    return Agree(fsdp::Materialize(*model), "making the model");
  }

  // Reads this rank's own parts, unless the run goes on from other files.
  absl::Status ReadInit() {
    if (options_.init.empty()) return absl::OkStatus();
    if (model_.offload() != nullptr && model_.offload()->step() > 0) {
      return absl::OkStatus();
    }
    absl::Status read =
        fsdp::checkpoint::LoadModel(options_.init, model_.module());
    // Ranks of a sharded model have agreed in LoadModel().
    if (options_.sharding.has_value()) return read;
    return Agree(read, "reading the initial parameters");
  }

  absl::Status MakeModel() {
    Gpt model(nullptr);
    FSDP_RETURN_IF_ERROR(InitializeModel(model));
    for (const at::Tensor& parameter : model->parameters()) {
      report_.num_parameters += parameter.numel();
    }
    FSDP_ASSIGN_OR_RETURN(model_, MakeTrainable(options_, std::move(model),
                                                context_.communicator));
    FSDP_RETURN_IF_ERROR(ReadInit());
    if (options_.save_init.empty()) return absl::OkStatus();
    fsdp::checkpoint::ExportOptions exported;
    exported.ranks = &communicator_;
    return fsdp::checkpoint::ExportModel(options_.save_init, model_.module(),
                                         exported);
  }

  absl::Status TrainModel() {
    PrintIntroduction();
    TrainerContext trainer;
    trainer.checkpoints = checkpoints_.get();
    trainer.signal = context_.signal;
    trainer.replica = context_.replica;
    std::optional<Traffic> before_timed;
    trainer.on_timed_begin = [&] { before_timed = TrafficSoFar(); };
    if (IsFirst()) {
      trainer.on_resumed = [](int64_t step,
                              const std::vector<std::string>& odd) {
        std::cout << "goes on after step " << step << std::endl;
        for (const std::string& line : odd) std::cout << line << std::endl;
      };
      trainer.replica.on_members = [](int64_t step,
                                      const std::string& members) {
        std::cout << "from step " << step << " on replicas " << members
                  << std::endl;
      };
      trainer.on_step = [this](int64_t step, double loss) {
        ShowStep(step, loss);
      };
    }
    Batches batches(
        options_.model.vocab, {options_.batch, options_.model.seq},
        {communicator_.rank(), communicator_.world_size(), context_.device});
    std::unique_ptr<fsdp::Trace> trace;
    if (!options_.trace.empty()) {
      FSDP_ASSIGN_OR_RETURN(trace, fsdp::Trace::Start({communicator_.rank()}));
    }
    FSDP_ASSIGN_OR_RETURN(result_, Train(options_, trainer, model_, batches,
                                         context_.communicator));
    if (trace != nullptr) {
      trace->Stop();
      FSDP_RETURN_IF_ERROR(fsdp::WriteTrace(
          *trace, communicator_, options_.trace, options_.trace_steps));
    }
    return ReportTraffic(before_timed.value_or(TrafficSoFar()));
  }

  // Prints a line now and then.
  void ShowStep(int64_t step, double loss) {
    const absl::Time now = absl::Now();
    const int64_t last = options_.warmup + options_.steps;
    if (step < last && now - shown_ < kShowInterval) return;
    std::cout << absl::StrFormat("step %d/%d  loss %.3f", step, last, loss);
    if (shown_ != absl::InfinitePast()) {
      const auto tokens = static_cast<double>(
          (step - shown_step_) * communicator_.world_size() * options_.batch *
          options_.model.seq);
      std::cout << absl::StrFormat(
          "  %.0f tokens/s", tokens / absl::ToDoubleSeconds(now - shown_));
    }
    std::cout << std::endl;
    shown_ = now;
    shown_step_ = step;
  }

  void PrintIntroduction() const {
    if (!IsFirst()) return;
    std::cout << absl::StrFormat(
        "%.1f million parameters, %s, %s\n",
        static_cast<double>(report_.num_parameters) / 1e6,
        options_.sharding.has_value() ? "sharded" : "not sharded",
        communicator_.ToString());
    const fsdp::OffloadSpace* const offload = model_.offload();
    if (offload != nullptr) std::cout << offload->Describe();
    if (offload != nullptr && offload->step() > 0) {
      std::cout << "goes on after step " << offload->step() << "\n";
    }
    std::cout << std::flush;
  }

  // Counts from the start of the run.
  struct Traffic {
    CollectiveCounts collectives;
    fsdp::OffloadStats offload;
  };

  Traffic TrafficSoFar() const {
    const auto gathers = context_.log->TotalsOf(Collective::kAllGather);
    const auto reduces = context_.log->TotalsOf(Collective::kReduceScatter);
    Traffic traffic;
    traffic.collectives = {gathers.count, reduces.count, gathers.bytes,
                           reduces.bytes};
    if (model_.offload() != nullptr) {
      traffic.offload = model_.offload()->stats();
    }
    return traffic;
  }

  absl::Status ReportTraffic(const Traffic& before) {
    const CollectiveCounts& from = before.collectives;
    const CollectiveCounts to = TrafficSoFar().collectives;
    report_.collectives = {to.all_gathers - from.all_gathers,
                           to.reduce_scatters - from.reduce_scatters,
                           to.bytes_gathered - from.bytes_gathered,
                           to.bytes_reduced - from.bytes_reduced};
    if (model_.offload() == nullptr) return absl::OkStatus();
    const fsdp::OffloadStats now = model_.offload()->stats();
    const fsdp::OffloadStats& then = before.offload;
    const double waited =
        now.memory.waited_seconds - then.memory.waited_seconds;
    std::vector<int64_t> mine = {static_cast<int64_t>(waited * 1e6)};
    for (int kind = 0; kind < fsdp::kNumRestingKinds; ++kind) {
      mine.push_back(now.stores[kind].reads.bytes -
                     then.stores[kind].reads.bytes);
      mine.push_back(now.stores[kind].writes.bytes -
                     then.stores[kind].writes.bytes);
    }
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::vector<int64_t>> by_rank,
        GatherNumbers(mine, "bytes read and written", communicator_));
    OffloadReport& offload = report_.offload.emplace();
    offload.plan = model_.offload()->plan();
    for (const std::vector<int64_t>& numbers : by_rank) {
      offload.waited_seconds.push_back(static_cast<double>(numbers[0]) / 1e6);
      for (int kind = 0; kind < fsdp::kNumRestingKinds; ++kind) {
        offload.bytes_read[kind] += numbers[1 + 2 * kind];
        offload.bytes_written[kind] += numbers[2 + 2 * kind];
      }
    }
    return absl::OkStatus();
  }

  absl::Status GatherPeakMemory() {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    FSDP_ASSIGN_OR_RETURN(
        const std::vector<std::vector<int64_t>> by_rank,
        GatherNumbers({usage.ru_maxrss / 1024}, "peak memory", communicator_));
    for (const std::vector<int64_t>& rank : by_rank) {
      report_.peak_rss_mb.push_back(rank.front());
    }
    return absl::OkStatus();
  }

  absl::Status PublishReport() {
    if (!IsFirst()) return absl::OkStatus();
    report_.options = options_;
    report_.world = communicator_.world_size();
    report_.losses = result_.mean_losses;
    report_.loss_rank0 = result_.own_losses;
    report_.step_seconds = result_.step_seconds;
    std::cout << ToJson(report_, /*of_steps=*/false).ToString() << std::endl;
    if (!json_.has_value()) return absl::OkStatus();
    return json_->Write(ToJson(report_, /*of_steps=*/true).ToString() + "\n");
  }

  const TrainOptions& options_;
  const RankContext& context_;
  Communicator& communicator_;
  TrainableModel model_;
  std::unique_ptr<fsdp::checkpoint::Checkpointer> checkpoints_;  // or null
  TrainingResult result_;
  Report report_;
  absl::Time shown_ = absl::InfinitePast();  // when a step was
  int64_t shown_step_ = 0;
  // Set on the first rank if they are asked for.
  std::optional<fsdp::OutputFile> json_;
  std::optional<fsdp::OutputFile> trace_;  // keeps a FIFO's reader
};

}  // namespace

absl::Status RunRank(const TrainOptions& options, const RankContext& context) {
  // Who starts replicas divides the host's cores among the ranks of all.
  if (options.threads > 0 || !context.replica.join) {
    at::set_num_threads(options.threads > 0 ? options.threads
                                            : fsdp::comm::ThreadsPerRank(
                                                  context.ranks_on_host));
  }
  absl::Status status;
  const absl::Status guarded = fsdp::TorchToStatus("choosing a device", [&] {
    const c10::DeviceGuard guard(context.device);
    status = RankRun(options, context).Run();
  });
  status.Update(guarded);
  // An agreed error lets nobody wait, and some may still have to hear of it.
  const bool is_alone =
      !absl::IsCancelled(status) && !fsdp::comm::IsAgreed(status);
  if (!status.ok() && is_alone) context.communicator->Abort(status);
  return status;
}

}  // namespace gpt
