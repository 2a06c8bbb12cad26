#include "checkpoint/load/run_loader.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/optimizer_loader.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/run/rank_values.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/memory/buffer_layout.h"
#include "ranges/tensor_range.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "loading a checkpoint";
// A million parameters' names and numbers.
constexpr int64_t kMaxTrainingBytes = int64_t{256} << 20;
// Random states and entries, and the names of values of the rank.
constexpr int64_t kMaxRankBytes = int64_t{1} << 30;

class Loading {
 public:
  Loading(const LoadContext& context, int64_t step, TrainingRun& run)
      : context_(context), step_(step), run_(run) {}

  absl::Status Load() {
    const NormalMode normal;
    FSDP_RETURN_IF_ERROR(
        context_.agree(TorchToStatus(kWhat, [this] { return Plan(); })));
    return context_.agree(TorchToStatus(kWhat, [this] { return Fill(); }));
  }

 private:
  // --- Changes nothing ------------------------------------------------------

  absl::Status Plan() {
    FSDP_RETURN_IF_ERROR(OpenFolder());
    FSDP_ASSIGN_OR_RETURN(RunValues values, RunValues::Read(run_, "Load()"));
    FSDP_RETURN_IF_ERROR(values.CheckRanks(context_.rank, context_.world_size));
    values_.emplace(std::move(values));
    FSDP_ASSIGN_OR_RETURN(const std::string text,
                          folder_->ReadText(kTrainingName, kMaxTrainingBytes));
    absl::StatusOr<TrainingRecord> record = ParseTraining(text);
    FSDP_RETURN_IF_ERROR(folder_->InFile(kTrainingName, record.status()));
    record_ = *std::move(record);
    FSDP_RETURN_IF_ERROR(CheckFits(record_, run_));
    if (context_.rank == 0) WarnOfSettings(record_, run_);
    FSDP_RETURN_IF_ERROR(PlanTensors());
    return ReadRankFiles();
  }

  absl::Status OpenFolder() {
    FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                          ListCheckpoints(*context_.files, context_.root));
    std::vector<int64_t> steps;
    for (const Committed& one : list) {
      steps.push_back(one.step);
      if (one.step != step_) continue;
      FSDP_ASSIGN_OR_RETURN(Manifest manifest,
                            ReadManifest(*context_.files, one.path));
      manifest_ = std::move(manifest);
      folder_.emplace(*context_.files, one.path, &manifest_.files);
    }
    if (folder_.has_value()) return absl::OkStatus();
    return absl::NotFoundError(absl::StrCat(
        context_.root, " has no checkpoint of step ", step_, "; it has ",
        steps.empty() ? "none" : absl::StrJoin(steps, ", ")));
  }

  absl::Status PlanTensors() {
    FSDP_ASSIGN_OR_RETURN(model_, folder_->ReadStem("model"));
    LoadPlanOptions options;
    options.strict = context_.strict;
    options.saves = context_.saves;
    options.aliases = &values_->model().aliases;
    FSDP_ASSIGN_OR_RETURN(plan_,
                          PlanLoad(model_, values_->model().all, options));
    if (run_.average != nullptr) {
      FSDP_ASSIGN_OR_RETURN(average_, folder_->ReadStem(kAverageStem));
      average_targets_ = *values_->averages();
      options.saves = nullptr;
      absl::StatusOr<LoadPlan> plan =
          PlanLoad(average_, average_targets_, options);
      if (!plan.ok()) {
        return Annotate(plan.status(), "the average of the weights");
      }
      average_plan_ = *std::move(plan);
    }
    if (run_.optimizer == nullptr) return absl::OkStatus();
    optimizer_.emplace(*values_, *run_.optimizer);
    return optimizer_->Plan(
        [this](const std::string& slot) {
          return folder_->ReadStem(absl::StrCat("optimizer/", slot));
        },
        record_, context_.strict);
  }

  // Only of as many ranks: others have no use for them.
  absl::Status ReadRankFiles() {
    if (record_.world_size != context_.world_size) return absl::OkStatus();
    const auto read = [this](const std::string& name, int64_t max_bytes,
                             std::optional<SmallFile>& file) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const std::string text,
                            folder_->ReadText(name, max_bytes));
      absl::StatusOr<SmallFile> parsed = ParseSmallFile(text);
      if (parsed.ok()) file = *std::move(parsed);
      return folder_->InFile(name, parsed.status());
    };
    FSDP_RETURN_IF_ERROR(
        read(RankFileName(context_.rank), kMaxRankBytes, rank_file_));
    const std::string buffers = BuffersFileName(context_.rank);
    if (manifest_.files.count(buffers) == 0) return absl::OkStatus();
    int64_t max_bytes = kMaxRankBytes;
    for (const TensorRange& other : values_->model().others()) {
      max_bytes += other.values.numel() *
                   static_cast<int64_t>(c10::elementSize(other.file_dtype()));
    }
    return read(buffers, max_bytes, whole_values_file_);
  }

  // --- Writes ---------------------------------------------------------------

  absl::Status Fill() {
    RangeReaderOptions options =
        ReaderOptionsFor(*values_, context_.world_size);
    options.advice = absl::StrCat(
        "load an older checkpoint of ", context_.root,
        " (Checkpointer::Steps()), or look with tools/checkpoint verify");
    FSDP_RETURN_IF_ERROR(Open(options));
    FSDP_RETURN_IF_ERROR(Read(0, plan_, values_->model().all));
    FSDP_RETURN_IF_ERROR(FillOwnWholeValues());
    FSDP_RETURN_IF_ERROR(FillAverage());
    if (optimizer_.has_value()) {
      FSDP_RETURN_IF_ERROR(
          optimizer_->Fill([this](size_t catalog, const LoadPlan& plan,
                                  absl::Span<const TensorRange> targets) {
            return Read(2 + catalog, plan, targets);
          }));
    }
    FSDP_RETURN_IF_ERROR(Restore(record_, run_));
    run_.rank_entries.clear();
    if (!rank_file_.has_value()) return absl::OkStatus();
    return RestoreRankValues(*rank_file_, values_->device(), run_);
  }

  // The files of all catalogs, in the order of their numbers.
  absl::Status Open(const RangeReaderOptions& options) {
    std::vector<const Catalog*> catalogs = {&model_, &average_};
    all_ = BytesOf(plan_) + BytesOf(average_plan_);
    if (optimizer_.has_value()) {
      all_ += optimizer_->bytes();
      for (const Catalog* slot : optimizer_->Catalogs()) {
        catalogs.push_back(slot);
      }
    }
    int64_t files = 0;
    for (const Catalog* catalog : catalogs) {
      first_files_.push_back(files);
      files += static_cast<int64_t>(catalog->files().size());
    }
    FSDP_ASSIGN_OR_RETURN(reader_, folder_->OpenAll(catalogs, options));
    return CompareCopies(plan_, *reader_);
  }

  // From the files of the catalog of this number.
  absl::Status Read(size_t catalog, const LoadPlan& plan,
                    absl::Span<const TensorRange> targets) {
    LoadProgress progress = nullptr;
    if (context_.progress != nullptr) {
      progress = [this](int64_t bytes, int64_t) {
        context_.progress(done_ + bytes, all_);
      };
    }
    FSDP_RETURN_IF_ERROR(
        LoadTensors(plan, targets, *reader_, progress, first_files_[catalog]));
    done_ += BytesOf(plan);
    return absl::OkStatus();
  }

  absl::Status FillAverage() {
    if (run_.average == nullptr) return absl::OkStatus();
    size_t next = 0;
    for (const TensorRange& leaf : values_->model().parameters()) {
      if (!run_.average->Of(leaf.values).defined()) continue;
      FSDP_ASSIGN_OR_RETURN(average_targets_[next++].values,
                            run_.average->ToFill(leaf.values));
    }
    return Read(1, average_plan_, average_targets_);
  }

  // Those of this rank, where ranks had different ones.
  absl::Status FillOwnWholeValues() {
    if (!whole_values_file_.has_value()) return absl::OkStatus();
    return TorchToStatus(
        "filling buffers and parameters that are not sharded", [&] {
          const c10::NoGradGuard no_grad;
          for (const TensorRange& other : values_->model().others()) {
            const auto found = whole_values_file_->tensors.find(other.name);
            if (found == whole_values_file_->tensors.end()) continue;
            if (found->second.sizes() != other.values.sizes()) continue;
            CopyInto(other.values.detach(), found->second);
          }
        });
  }

  const LoadContext& context_;
  const int64_t step_;
  TrainingRun& run_;
  Manifest manifest_;
  std::optional<SourceFolder> folder_;
  std::optional<RunValues> values_;
  TrainingRecord record_;
  Catalog model_;
  LoadPlan plan_;  // of the model
  Catalog average_;
  std::vector<TensorRange> average_targets_;
  LoadPlan average_plan_;
  std::optional<OptimizerLoader> optimizer_;
  std::unique_ptr<RangeReader> reader_;
  std::vector<int64_t> first_files_;  // of each catalog, in reader_
  // Bytes of the plans, for the progress.
  int64_t done_ = 0;
  int64_t all_ = 0;
  std::optional<SmallFile> rank_file_;
  std::optional<SmallFile> whole_values_file_;
};

}  // namespace

absl::Status LoadRun(const LoadContext& context, int64_t step,
                     TrainingRun& run) {
  return Loading(context, step, run).Load();
}

}  // namespace fsdp::checkpoint
