#include "checkpoint/load/run_loader.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/model_targets.h"
#include "checkpoint/load/optimizer_loader.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/run/rank_values.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/state/model_values.h"

namespace fsdp::checkpoint {
namespace {

// A million parameters' names and numbers.
constexpr int64_t kMaxTrainingBytes = int64_t{256} << 20;
// Random states and entries, and the names of values of the rank.
constexpr int64_t kMaxRankBytes = int64_t{1} << 30;

// The files of the model, and what they fill.
struct Source {
  Catalog catalog;
  std::vector<LoadTarget> targets;
  LoadPlan plan;
};

class Loading {
 public:
  Loading(const LoadContext& context, int64_t step, TrainingRun& run)
      : context_(context), step_(step), run_(run) {}

  absl::Status Load() {
    const NormalMode normal;
    FSDP_RETURN_IF_ERROR(context_.agree(Plan()));
    return context_.agree(Fill());
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
    FSDP_ASSIGN_OR_RETURN(record_, ParseTraining(text));
    FSDP_RETURN_IF_ERROR(CheckFits(record_, run_));
    FSDP_RETURN_IF_ERROR(PlanModel());
    FSDP_RETURN_IF_ERROR(PlanOptimizer());
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

  absl::Status PlanModel() {
    FSDP_ASSIGN_OR_RETURN(model_.catalog, folder_->ReadStem("model"));
    model_.targets = TargetsOf(*values_);
    LoadPlanOptions options;
    options.strict = context_.strict;
    FSDP_ASSIGN_OR_RETURN(model_.plan,
                          PlanLoad(model_.catalog, model_.targets, options));
    return absl::OkStatus();
  }

  absl::Status PlanOptimizer() {
    if (values_->optimizer() == nullptr) return absl::OkStatus();
    optimizer_.emplace(*values_, *run_.optimizer);
    return optimizer_->Plan(*folder_, record_, context_.strict);
  }

  // Only of as many ranks: others have no use for them.
  absl::Status ReadRankFiles() {
    if (record_.world_size != context_.world_size) return absl::OkStatus();
    const auto read = [this](const std::string& name, int64_t max_bytes,
                             std::optional<SmallFile>& file) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const std::string text,
                            folder_->ReadText(name, max_bytes));
      FSDP_ASSIGN_OR_RETURN(file, ParseSmallFile(text));
      return absl::OkStatus();
    };
    FSDP_RETURN_IF_ERROR(
        read(RankFileName(context_.rank), kMaxRankBytes, rank_file_));
    const std::string buffers = BuffersFileName(context_.rank);
    if (manifest_.files.count(buffers) == 0) return absl::OkStatus();
    int64_t max_bytes = kMaxRankBytes;
    for (const WholeValue& other : values_->model().others) {
      max_bytes += other.tensor.numel() *
                   static_cast<int64_t>(c10::elementSize(other.file_dtype));
    }
    return read(buffers, max_bytes, whole_values_file_);
  }

  // --- Writes ---------------------------------------------------------------

  absl::Status Fill() {
    std::vector<const Catalog*> catalogs = {&model_.catalog};
    all_ = BytesOf(model_.plan);
    if (optimizer_.has_value()) {
      all_ += optimizer_->bytes();
      for (const Catalog* slot : optimizer_->Catalogs()) {
        catalogs.push_back(slot);
      }
    }
    FSDP_ASSIGN_OR_RETURN(reader_, Open(catalogs));
    FSDP_RETURN_IF_ERROR(Read(0, model_.plan, model_.targets));
    FSDP_RETURN_IF_ERROR(FillOwnWholeValues());
    if (optimizer_.has_value()) {
      FSDP_RETURN_IF_ERROR(
          optimizer_->Fill([this](size_t catalog, const LoadPlan& plan,
                                  absl::Span<const LoadTarget> targets) {
            return Read(1 + catalog, plan, targets);
          }));
    }
    FSDP_RETURN_IF_ERROR(Restore(record_, run_));
    run_.rank_entries.clear();
    if (!rank_file_.has_value()) return absl::OkStatus();
    return RestoreRankValues(*rank_file_, values_->device(), run_);
  }

  absl::StatusOr<std::unique_ptr<RangeReader>> Open(
      absl::Span<const Catalog* const> catalogs) {
    int64_t files = 0;
    for (const Catalog* catalog : catalogs) {
      first_files_.push_back(files);
      files += static_cast<int64_t>(catalog->files().size());
    }
    RangeReaderOptions options;
    options.caching = CachingFor(*values_, context_.world_size);
    options.advice = absl::StrCat(
        "load an older checkpoint of ", context_.root,
        " (Checkpointer::Steps()), or look with tools/checkpoint verify");
    return folder_->OpenAll(catalogs, options);
  }

  // From the files of one of the catalogs.
  absl::Status Read(size_t catalog, const LoadPlan& plan,
                    absl::Span<const LoadTarget> targets) {
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

  // Those of this rank, where ranks had different ones.
  absl::Status FillOwnWholeValues() {
    if (!whole_values_file_.has_value()) return absl::OkStatus();
    return TorchToStatus(
        "filling buffers and parameters that are not sharded", [&] {
          const c10::NoGradGuard no_grad;
          for (const WholeValue& other : values_->model().others) {
            const auto found = whole_values_file_->tensors.find(other.name);
            if (found == whole_values_file_->tensors.end()) continue;
            if (found->second.sizes() != other.tensor.sizes()) continue;
            CopyInto(other.tensor.detach(), found->second);
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
  Source model_;
  std::optional<OptimizerLoader> optimizer_;
  std::unique_ptr<RangeReader> reader_;
  std::vector<int64_t> first_files_;  // of each catalog, in reader_
  std::optional<SmallFile> rank_file_;
  std::optional<SmallFile> whole_values_file_;
  // Bytes of the plans, for context_.progress.
  int64_t done_ = 0;
  int64_t all_ = 0;
};

}  // namespace

absl::Status LoadRun(const LoadContext& context, int64_t step,
                     TrainingRun& run) {
  return Loading(context, step, run).Load();
}

}  // namespace fsdp::checkpoint
