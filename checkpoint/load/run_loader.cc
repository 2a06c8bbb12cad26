#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/format/tensor_bytes.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/training_json.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {
namespace {

constexpr char kWhat[] = "loading a checkpoint";
// A million parameters' names and numbers.
constexpr int64_t kMaxTrainingBytes = int64_t{256} << 20;
// Random states and entries, and the names of values of the rank.
constexpr int64_t kMaxRankBytes = int64_t{1} << 30;

// New states have this much memory beside those that they replace, and so does
// the memory into which states that rest elsewhere are read; there is more only
// for the states of one parameter, or of one unit that rests elsewhere.
constexpr int64_t kBatchBytes = int64_t{64} << 20;

// Returns whether values laid out like `like` can be read into `held`.
bool CanTake(const at::Tensor& held, const at::Tensor& like) {
  return held.defined() && held.layout() == c10::kStrided && !held.is_meta() &&
         held.scalar_type() == like.scalar_type() &&
         held.sizes() == like.sizes() && held.strides() == like.strides() &&
         !held.is_inference() && !held.is_conj() && !held.is_neg();
}

bool MayRest(const at::Tensor& shard) {
  return RestingMemory::Of(shard) != nullptr;
}

// Parameters that are not sharded are none's.
int UnitOf(const TensorRange& leaf) { return leaf.is_whole ? -1 : leaf.unit; }

// Returns memory for something laid out like `parameter`, such as an
// optimizer's state, as a target; on c10::kMeta it takes none and is only to
// plan with.
TensorRange MakeState(const TensorRange& parameter, c10::ScalarType dtype,
                      c10::Device device) {
  // It has the parameter's sizes and strides, as the optimizer would make it.
  return parameter.With(
      at::empty_like(parameter.values.detach(),
                     at::TensorOptions().dtype(dtype).device(device)));
}

// The files of one stem, and what they fill.
struct Stem {
  std::string name;
  Catalog catalog;
  std::vector<TensorRange> targets;
  LoadPlan plan;
  int64_t first_file = 0;  // of the catalog, in the reader
};

// Returns what of the plan fills targets for whose values `takes` is true.
template <typename Takes>
LoadPlan PartOf(const Stem& stem, Takes takes) {
  const auto is_taken = [&](const auto& read) {
    return takes(stem.targets[read.target].values);
  };
  LoadPlan part;
  absl::c_copy_if(stem.plan.straight, std::back_inserter(part.straight),
                  is_taken);
  absl::c_copy_if(stem.plan.whole, std::back_inserter(part.whole), is_taken);
  return part;
}

// States are cast to the dtype of their parameter if both are floating-point.
// States that exist already with the same layout and dtype are filled in place.
// Others are made, filled and given to the optimizer a few at a time, so that
// the states that they replace, and the memory into which resting ones are
// read, never exist for all of them at once.
class OptimizerLoader {
 public:
  // All outlive it. `values` has the states of `optimizer`, which this takes
  // over.
  OptimizerLoader(RunValues& values, torch::optim::Optimizer& optimizer)
      : values_(values), optimizer_(optimizer) {}

  // Changes and allocates nothing. Renames the parameters in `record` as the
  // model has them. InvalidArgument lists all that does not fit, for one slot.
  absl::Status Plan(const SourceFolder& folder, TrainingRecord& record,
                    bool strict) {
    UseFirstNames(record);
    for (const auto& [parameter, numbers] : record.numbers) {
      states_[parameter].numbers = numbers;
    }
    present_ = values_.ReleaseStates();
    for (const std::string& name : record.slots) {
      FSDP_RETURN_IF_ERROR(PlanSlot(folder, name, strict));
    }
    // What does not fit is said before anything is read.
    FSDP_ASSIGN_OR_RETURN(
        replacement_,
        PlanReplacement(parameters(), optimizer_, *values_.optimizer(), states_,
                        *record.groups, strict));
    // Leaves that the optimizer does not step get no state.
    std::set<const void*> stepped;
    for (const auto& [leaf, state] : replacement_.states) stepped.insert(leaf);
    for (size_t i = 0; i < parameters().size(); ++i) {
      const at::Tensor& shard = parameters()[i].values;
      if (stepped.count(shard.unsafeGetTensorImpl()) > 0) {
        leaves_.push_back(static_cast<int>(i));
        continue;
      }
      for (Stem& slot : slots_) slot.targets[i].values.reset();
    }
    return absl::OkStatus();
  }

  // Valid as long as this lives; after Plan().
  absl::Span<Stem> slots() { return absl::MakeSpan(slots_); }

  // The bytes that Fill() reads.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const Stem& slot : slots_) {
      bytes += BytesOf(PartOf(
          slot, [](const at::Tensor& state) { return state.defined(); }));
    }
    return bytes;
  }

  // Reads a part of what fills the targets of a slot.
  using Read =
      absl::FunctionRef<absl::Status(const Stem& slot, const LoadPlan& part)>;

  // Call it once. After an error the optimizer is partly filled.
  absl::Status Fill(Read read) {
    ApplyOptions(replacement_, optimizer_);
    FSDP_RETURN_IF_ERROR(ReadStates(read));
    std::vector<int> batch;
    int64_t bytes = 0;
    for (const int leaf : leaves_) {
      const int64_t more = PassingBytes(leaf);
      // What is taken up of a unit brings in all of it.
      const bool may_end =
          !batch.empty() &&
          (!MayRest(parameters()[leaf].values) ||
           UnitOf(parameters()[leaf]) != UnitOf(parameters()[batch.back()]));
      if (bytes + more > kBatchBytes && may_end) {
        FSDP_RETURN_IF_ERROR(FillBatch(batch, read));
        batch.clear();
        bytes = 0;
      }
      batch.push_back(leaf);
      bytes += more;
    }
    FSDP_RETURN_IF_ERROR(FillBatch(batch, read));
    return TakeUpStates(optimizer_);
  }

 private:
  // Tied parameters have the names that this model calls them by, whichever of
  // theirs the checkpoint has.
  void UseFirstNames(TrainingRecord& record) const {
    const std::map<std::string, std::string>& aliases = values_.model().aliases;
    for (const auto& [alias, name] : aliases) {
      auto numbers = record.numbers.extract(alias);
      if (numbers.empty()) continue;
      numbers.key() = name;
      record.numbers.insert(std::move(numbers));  // unless it is there
    }
    for (OptimizerGroup& group : *record.groups) {
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
    for (const auto& [alias, name] : values_.model().aliases) {
      if (found != nullptr) break;
      if (name == parameter) found = catalog.Find(alias);
    }
    return found;
  }

  absl::Status PlanSlot(const SourceFolder& folder, const std::string& name,
                        bool strict) {
    Stem& slot = slots_.emplace_back();
    slot.name = name;
    FSDP_ASSIGN_OR_RETURN(slot.catalog,
                          folder.ReadStem(absl::StrCat("optimizer/", name)));
    for (const TensorRange& leaf : parameters()) {
      TensorRange& target = slot.targets.emplace_back();
      target.name = leaf.name;
      const StoredTensor* const stored = FindState(slot.catalog, leaf.name);
      if (stored == nullptr) continue;
      // As in PyTorch, states of floating-point parameters become of their
      // dtype. PlanLoad() refuses those that LibTorch does not have.
      const c10::ScalarType own = leaf.values.scalar_type();
      auto dtype = TorchDtype(stored->info.dtype).value_or(own);
      if (c10::isFloatingType(own) && c10::isFloatingType(dtype)) dtype = own;
      target = StateFor(leaf, name, dtype);
      states_[leaf.name].tensors[name] = target.values;
    }
    LoadPlanOptions options;
    options.strict = strict;
    options.aliases = &values_.model().aliases;
    // Parameters may have no state.
    options.saves = [](const std::string&) { return false; };
    FSDP_ASSIGN_OR_RETURN(
        slot.plan, Annotate(PlanLoad(slot.catalog, slot.targets, options),
                            absl::StrCat("the optimizer's ", name)));
    return absl::OkStatus();
  }

  TensorRange StateFor(const TensorRange& leaf, const std::string& slot,
                       c10::ScalarType dtype) {
    TensorRange planned = MakeState(leaf, dtype, c10::kMeta);
    const auto present = present_.find(leaf.name);
    if (present == present_.end()) return planned;
    const auto held = present->second.tensors.find(slot);
    if (held == present->second.tensors.end() ||
        !CanTake(held->second, planned.values)) {
      return planned;
    }
    // Two states in one memory part here.
    const bool is_own =
        taken_
            .insert({held->second.storage().unsafeGetStorageImpl(),
                     held->second.storage_offset()})
            .second;
    return is_own ? leaf.With(held->second) : planned;
  }

  absl::Span<const TensorRange> parameters() const {
    return values_.model().parameters();
  }

  // Bytes of a leaf's new states that exist beside old ones, or for a while.
  int64_t PassingBytes(int leaf) {
    const auto& named = parameters()[leaf];
    if (!MayRest(named.values) && present_.count(named.name) == 0) return 0;
    int64_t bytes = 0;
    for (const Stem& slot : slots_) {
      const at::Tensor& state = slot.targets[leaf].values;
      if (state.defined()) bytes += static_cast<int64_t>(state.nbytes());
    }
    return bytes;
  }

  // Reads all states that have memory. From then on others alone have them.
  absl::Status ReadStates(Read read) {
    const auto is_here = [](const at::Tensor& state) {
      return state.defined() && !state.is_meta();
    };
    for (Stem& slot : slots_) {
      const LoadPlan part = PartOf(slot, is_here);
      if (!part.straight.empty() || !part.whole.empty()) {
        FSDP_RETURN_IF_ERROR(read(slot, part));
      }
      for (TensorRange& target : slot.targets) {
        if (is_here(target.values)) target.values.reset();
      }
    }
    return absl::OkStatus();
  }

  // All that is still to be read is new.
  absl::Status FillBatch(absl::Span<const int> leaves, Read read) {
    bool has_new = false;
    std::vector<at::Tensor> shards;
    for (const int leaf : leaves) {
      const TensorRange& parameter = parameters()[leaf];
      shards.push_back(parameter.values);
      for (Stem& slot : slots_) {
        TensorRange& target = slot.targets[leaf];
        if (!target.values.defined()) continue;
        has_new = true;
        target = MakeState(parameter, target.values.scalar_type(),
                           shards.back().device());
        states_[parameter.name].tensors[slot.name] = target.values;
      }
    }
    FSDP_RETURN_IF_ERROR(ReadStates(read));
    for (size_t i = 0; i < leaves.size(); ++i) {
      const std::string& name = parameters()[leaves[i]].name;
      FSDP_RETURN_IF_ERROR(ApplyState(shards[i], states_[name], optimizer_));
      states_.erase(name);
      present_.erase(name);
    }
    return has_new ? TakeUpStates(optimizer_, shards) : absl::OkStatus();
  }

  RunValues& values_;
  torch::optim::Optimizer& optimizer_;
  // Targets are by leaf: those without a state, and what is read, undefined.
  std::vector<Stem> slots_;
  std::map<std::string, OptimizerSlots> present_;  // by parameter, as states_
  // New states. Tensors that are still to be made are on c10::kMeta.
  std::map<std::string, OptimizerSlots> states_;
  std::set<std::pair<const void*, int64_t>> taken_;  // memory of states_
  OptimizerReplacement replacement_;
  std::vector<int> leaves_;  // that get a state
};

class Loading {
 public:
  Loading(const LoadContext& context, int64_t step, TrainingRun& run)
      : context_(context),
        together_(context.together),
        step_(step),
        run_(run) {}

  absl::StatusOr<std::vector<int64_t>> Load() {
    const NormalMode normal;
    FSDP_RETURN_IF_ERROR(together_.Act(kWhat, [this] { return Plan(); }));
    FSDP_RETURN_IF_ERROR(together_.Act(kWhat, [this] { return Fill(); }));
    return steps_;
  }

 private:
  // --- Changes nothing ------------------------------------------------------

  absl::Status Plan() {
    FSDP_RETURN_IF_ERROR(OpenFolder());
    FSDP_ASSIGN_OR_RETURN(values_, RunValues::Read(run_, "Load()"));
    FSDP_RETURN_IF_ERROR(values_->CheckRanks(together_));
    FSDP_ASSIGN_OR_RETURN(const std::string text,
                          folder_->ReadText(kTrainingName, kMaxTrainingBytes));
    FSDP_ASSIGN_OR_RETURN(
        record_, Annotate(ParseTraining(text), folder_->PathOf(kTrainingName)));
    FSDP_RETURN_IF_ERROR(CheckFits(record_, run_));
    if (together_.rank() == 0) WarnOfSettings(record_, run_);
    FSDP_RETURN_IF_ERROR(PlanTensors());
    return ReadRankFiles();
  }

  absl::Status OpenFolder() {
    FSDP_ASSIGN_OR_RETURN(const std::vector<Committed> list,
                          ListCheckpoints(*context_.files, context_.root));
    for (const Committed& one : list) {
      steps_.push_back(one.step);
      if (one.step != step_) continue;
      FSDP_ASSIGN_OR_RETURN(Manifest manifest,
                            ReadManifest(*context_.files, one.path));
      has_whole_values_ =
          manifest.files.count(BuffersFileName(together_.rank())) > 0;
      folder_.emplace(*context_.files, one.path, std::move(manifest.files));
    }
    if (folder_.has_value()) return absl::OkStatus();
    return absl::NotFoundError(absl::StrCat(
        context_.root, " has no checkpoint of step ", step_, "; it has ",
        steps_.empty() ? "none" : absl::StrJoin(steps_, ", ")));
  }

  absl::Status PlanTensors() {
    FSDP_ASSIGN_OR_RETURN(model_.catalog, folder_->ReadStem("model"));
    model_.targets = values_->model().all;
    LoadPlanOptions options;
    options.strict = context_.strict;
    options.saves = context_.saves;
    options.aliases = &values_->model().aliases;
    FSDP_ASSIGN_OR_RETURN(model_.plan,
                          PlanLoad(model_.catalog, model_.targets, options));
    if (run_.average != nullptr) {
      FSDP_ASSIGN_OR_RETURN(average_.catalog, folder_->ReadStem(kAverageStem));
      average_.targets = *values_->averages();
      options.saves = nullptr;
      FSDP_ASSIGN_OR_RETURN(
          average_.plan,
          Annotate(PlanLoad(average_.catalog, average_.targets, options),
                   "the average of the weights"));
    }
    if (run_.optimizer == nullptr) return absl::OkStatus();
    optimizer_.emplace(*values_, *run_.optimizer);
    return optimizer_->Plan(*folder_, record_, context_.strict);
  }

  // Only of as many ranks: others have no use for them.
  absl::Status ReadRankFiles() {
    if (record_.world_size != together_.world_size()) return absl::OkStatus();
    const auto read = [this](const std::string& name, int64_t max_bytes,
                             std::optional<SmallFile>& file) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const std::string text,
                            folder_->ReadText(name, max_bytes));
      FSDP_ASSIGN_OR_RETURN(
          file, Annotate(ParseSmallFile(text), folder_->PathOf(name)));
      return absl::OkStatus();
    };
    FSDP_RETURN_IF_ERROR(
        read(RankFileName(together_.rank()), kMaxRankBytes, rank_file_));
    if (!has_whole_values_) return absl::OkStatus();
    int64_t max_bytes = kMaxRankBytes;
    for (const TensorRange& other : values_->model().others()) {
      max_bytes += other.values.numel() *
                   static_cast<int64_t>(c10::elementSize(other.file_dtype()));
    }
    return read(BuffersFileName(together_.rank()), max_bytes,
                whole_values_file_);
  }

  // --- Writes ---------------------------------------------------------------

  absl::Status Fill() {
    RangeReaderOptions options =
        ReaderOptionsFor(*values_, together_.world_size());
    options.advice = absl::StrCat(
        "load an older checkpoint of ", context_.root,
        " (Checkpointer::Steps()), or look with tools/checkpoint verify");
    FSDP_RETURN_IF_ERROR(Open(options));
    FSDP_RETURN_IF_ERROR(Read(model_, model_.plan));
    FillOwnWholeValues();
    FSDP_RETURN_IF_ERROR(FillAverage());
    if (optimizer_.has_value()) {
      FSDP_RETURN_IF_ERROR(
          optimizer_->Fill([this](const Stem& slot, const LoadPlan& part) {
            return Read(slot, part);
          }));
    }
    FSDP_RETURN_IF_ERROR(Restore(record_, run_));
    run_.rank_entries.clear();
    if (!rank_file_.has_value()) return absl::OkStatus();
    RestoreRankValues(*rank_file_, values_->device(), run_);
    return absl::OkStatus();
  }

  absl::Status Open(const RangeReaderOptions& options) {
    std::vector<Stem*> stems = {&model_, &average_};
    all_ = BytesOf(model_.plan) + BytesOf(average_.plan);
    if (optimizer_.has_value()) {
      all_ += optimizer_->bytes();
      for (Stem& slot : optimizer_->slots()) stems.push_back(&slot);
    }
    std::vector<const Catalog*> catalogs;
    int64_t files = 0;
    for (Stem* const stem : stems) {
      catalogs.push_back(&stem->catalog);
      stem->first_file = files;
      files += static_cast<int64_t>(stem->catalog.files().size());
    }
    FSDP_ASSIGN_OR_RETURN(reader_, folder_->Open(catalogs, options));
    return CompareCopies(model_.plan, *reader_);
  }

  absl::Status Read(const Stem& stem, const LoadPlan& part) {
    LoadProgress progress = nullptr;
    if (context_.progress != nullptr) {
      progress = [this](int64_t bytes, int64_t) {
        context_.progress(done_ + bytes, all_);
      };
    }
    FSDP_RETURN_IF_ERROR(
        LoadTensors(part, stem.targets, *reader_, progress, stem.first_file));
    done_ += BytesOf(part);
    return absl::OkStatus();
  }

  absl::Status FillAverage() {
    if (run_.average == nullptr) return absl::OkStatus();
    size_t next = 0;
    for (const TensorRange& leaf : values_->model().parameters()) {
      if (!run_.average->Of(leaf.values).defined()) continue;
      FSDP_ASSIGN_OR_RETURN(average_.targets[next++].values,
                            run_.average->ToFill(leaf.values));
    }
    return Read(average_, average_.plan);
  }

  // Those of this rank, where ranks had different ones.
  void FillOwnWholeValues() {
    if (!whole_values_file_.has_value()) return;
    const c10::NoGradGuard no_grad;
    for (const TensorRange& other : values_->model().others()) {
      const auto found = whole_values_file_->tensors.find(other.name);
      if (found == whole_values_file_->tensors.end()) continue;
      if (found->second.sizes() != other.values.sizes()) continue;
      CopyInto(other.values.detach(), found->second);
    }
  }

  const LoadContext& context_;
  const Together& together_;
  const int64_t step_;
  TrainingRun& run_;
  std::vector<int64_t> steps_;  // that there are
  std::optional<SourceFolder> folder_;
  bool has_whole_values_ = false;  // a file with those of this rank
  std::optional<RunValues> values_;
  TrainingRecord record_;
  Stem model_;
  Stem average_;
  std::optional<OptimizerLoader> optimizer_;
  std::unique_ptr<RangeReader> reader_;
  // Bytes of the plans, for the progress.
  int64_t done_ = 0;
  int64_t all_ = 0;
  std::optional<SmallFile> rank_file_;
  std::optional<SmallFile> whole_values_file_;
};

}  // namespace

absl::StatusOr<std::vector<int64_t>> LoadRun(const LoadContext& context,
                                             int64_t step, TrainingRun& run) {
  return Loading(context, step, run).Load();
}

}  // namespace fsdp::checkpoint
