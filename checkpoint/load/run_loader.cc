#include "checkpoint/load/run_loader.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/range_reader.h"
#include "checkpoint/load/load_plan.h"
#include "checkpoint/load/model_targets.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/run/rank_values.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/torch_dtype.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/state/model_values.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kTrainingName[] = "training.json";
// A million parameters' names and numbers.
constexpr int64_t kMaxTrainingBytes = int64_t{256} << 20;
// Random states and entries, and the names of values of the rank.
constexpr int64_t kMaxRankBytes = int64_t{1} << 30;

// Files of one stem, and what they fill.
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
    UseFirstNames();
    for (const auto& [parameter, numbers] : record_.numbers) {
      slots_[parameter].numbers = numbers;
    }
    for (const std::string& slot : record_.slots) {
      FSDP_RETURN_IF_ERROR(PlanSlot(slot));
    }
    if (!context_.strict) DropUnknownSlots();
    // What does not fit is said before anything is read.
    FSDP_ASSIGN_OR_RETURN(replacement_,
                          PlanReplacement(values_->leaves(), *run_.optimizer,
                                          *values_->optimizer(), slots_,
                                          *record_.groups, context_.strict));
    return absl::OkStatus();
  }

  // Tied parameters have the names that this model calls them by, whichever of
  // theirs the checkpoint has.
  void UseFirstNames() {
    const std::map<std::string, std::string>& aliases =
        values_->model().aliases;
    for (const auto& [alias, name] : aliases) {
      auto numbers = record_.numbers.extract(alias);
      if (numbers.empty()) continue;
      numbers.key() = name;
      record_.numbers.insert(std::move(numbers));  // unless it is there
    }
    for (OptimizerGroup& group : *record_.groups) {
      std::set<std::string> names;
      for (const std::string& name : group.names) {
        const auto alias = aliases.find(name);
        names.insert(alias == aliases.end() ? name : alias->second);
      }
      group.names.assign(names.begin(), names.end());
    }
  }

  // The state of `parameter`, by any of its names.
  const StoredTensor* FindState(const Catalog& catalog,
                                const std::string& parameter) const {
    const StoredTensor* found = catalog.Find(parameter);
    for (const auto& [alias, name] : values_->model().aliases) {
      if (found != nullptr) break;
      if (name == parameter) found = catalog.Find(alias);
    }
    return found;
  }

  absl::Status PlanSlot(const std::string& slot) {
    Source& source = optimizer_.emplace_back();
    FSDP_ASSIGN_OR_RETURN(source.catalog,
                          folder_->ReadStem(absl::StrCat("optimizer/", slot)));
    const std::vector<NamedShard>& leaves = values_->leaves();
    for (size_t i = 0; i < leaves.size(); ++i) {
      const StoredTensor* const stored =
          FindState(source.catalog, leaves[i].name);
      if (stored == nullptr) continue;
      const auto dtype = TorchDtype(stored->info.dtype);
      if (!dtype.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat(
            slot, " of ", leaves[i].name, " is ", NameOf(stored->info.dtype),
            ", which LibTorch does not have"));
      }
      FSDP_ASSIGN_OR_RETURN(NewState state,
                            MakeState(*values_, static_cast<int>(i), *dtype));
      slots_[leaves[i].name].tensors[slot] = state.values;
      source.targets.push_back(std::move(state.target));
    }
    LoadPlanOptions options;
    options.strict = context_.strict;
    absl::StatusOr<LoadPlan> plan =
        PlanLoad(source.catalog, source.targets, options);
    if (!plan.ok()) {
      return absl::Status(plan.status().code(),
                          absl::StrCat("the optimizer's ", slot, ": ",
                                       plan.status().message()));
    }
    source.plan = *std::move(plan);
    return absl::OkStatus();
  }

  // Of parameters that the model does not have.
  void DropUnknownSlots() {
    std::map<std::string, OptimizerSlots> known;
    for (const NamedShard& leaf : values_->leaves()) {
      const auto found = slots_.find(leaf.name);
      if (found != slots_.end()) known.insert(*found);
    }
    slots_ = std::move(known);
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
    all_ = BytesOf(model_.plan);
    for (const Source& source : optimizer_) all_ += BytesOf(source.plan);
    FSDP_RETURN_IF_ERROR(FillFrom(model_));
    for (const Source& source : optimizer_) {
      FSDP_RETURN_IF_ERROR(FillFrom(source));
    }
    FSDP_RETURN_IF_ERROR(FillOwnWholeValues());
    if (values_->optimizer() != nullptr) {
      Apply(std::move(replacement_), *run_.optimizer);
      FSDP_RETURN_IF_ERROR(TakeUpStates(*run_.optimizer));
    }
    FSDP_RETURN_IF_ERROR(Restore(record_, run_));
    run_.rank_entries.clear();
    if (!rank_file_.has_value()) return absl::OkStatus();
    return RestoreRankValues(*rank_file_, values_->device(), run_);
  }

  absl::Status FillFrom(const Source& source) {
    RangeReaderOptions options;
    options.caching = CachingFor(*values_, context_.world_size);
    options.advice = absl::StrCat(
        "load an older checkpoint of ", context_.root,
        " (Checkpointer::Steps()), or look with tools/checkpoint verify");
    FSDP_ASSIGN_OR_RETURN(const auto reader,
                          folder_->Open(source.catalog, options));
    LoadProgress progress = nullptr;
    if (context_.progress != nullptr) {
      progress = [this](int64_t bytes, int64_t) {
        context_.progress(done_ + bytes, all_);
      };
    }
    FSDP_RETURN_IF_ERROR(
        LoadTensors(source.plan, source.targets, *reader, progress));
    done_ += BytesOf(source.plan);
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
  std::vector<Source> optimizer_;
  std::map<std::string, OptimizerSlots> slots_;  // new ones
  OptimizerReplacement replacement_;             // of slots_
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
