#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/normal_mode.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/format/catalog.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_loader.h"
#include "checkpoint/run/rank_values.h"
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

// Of new states beside those that they take the place of, or where those that
// rest elsewhere are read into; more only for the states of one parameter, or
// of one unit that rests elsewhere.
constexpr int64_t kBatchBytes = int64_t{64} << 20;

// Whether values laid out like `like` can be read into `held`.
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
absl::StatusOr<TensorRange> MakeState(const TensorRange& parameter,
                                      c10::ScalarType dtype,
                                      c10::Device device) {
  at::Tensor state;
  FSDP_RETURN_IF_ERROR(TorchToStatus("making an optimizer's state", [&] {
    const NormalMode normal;
    // Of the parameter's sizes and strides, as the optimizer would make it.
    state = at::empty_like(parameter.values.detach(),
                           at::TensorOptions().dtype(dtype).device(device));
  }));
  return parameter.With(state);
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
    places_by_leaf_.resize(parameters().size());
    for (const std::string& name : record.slots) {
      FSDP_ASSIGN_OR_RETURN(Catalog catalog,
                            folder.ReadStem(absl::StrCat("optimizer/", name)));
      FSDP_RETURN_IF_ERROR(PlanSlot(name, std::move(catalog), strict));
    }
    // What does not fit is said before anything is read.
    FSDP_ASSIGN_OR_RETURN(
        replacement_,
        PlanReplacement(parameters(), optimizer_, *values_.optimizer(), states_,
                        *record.groups, strict));
    // Leaves that the optimizer does not step get no state.
    std::set<const void*> stepped;
    for (const auto& [leaf, state] : replacement_.states) stepped.insert(leaf);
    for (size_t i = 0; i < places_by_leaf_.size(); ++i) {
      const at::Tensor& shard = parameters()[i].values;
      if (stepped.count(shard.unsafeGetTensorImpl()) > 0) {
        leaves_.push_back(static_cast<int>(i));
      }
    }
    return absl::OkStatus();
  }

  // The catalogs of the slots, valid as long as this lives; after Plan().
  std::vector<const Catalog*> Catalogs() const {
    std::vector<const Catalog*> catalogs;
    catalogs.reserve(slots_.size());
    for (const Slot& slot : slots_) catalogs.push_back(&slot.catalog);
    return catalogs;
  }

  // The bytes that Fill() reads.
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const int leaf : leaves_) {
      for (const Place& place : places_by_leaf_[leaf]) {
        bytes += BytesOf(slots_[place.slot].parts[place.target]);
      }
    }
    return bytes;
  }

  // Reads from the files of Catalogs()[catalog].
  using Read =
      absl::FunctionRef<absl::Status(size_t catalog, const LoadPlan& plan,
                                     absl::Span<const TensorRange> targets)>;

  // Call it once. After an error the optimizer is partly filled.
  absl::Status Fill(Read read) {
    ApplyOptions(replacement_, optimizer_);
    FSDP_RETURN_IF_ERROR(ReadPlaces(PlacesOf(leaves_, /*is_new=*/false), read));
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
  // The files of one slot, and what they fill.
  struct Slot {
    std::string name;
    Catalog catalog;
    std::vector<TensorRange> targets;
    std::vector<LoadPlan> parts;  // one per target
  };
  // A target of a slot.
  struct Place {
    size_t slot;
    size_t target;
  };

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

  absl::Status PlanSlot(const std::string& name, Catalog catalog, bool strict) {
    Slot& slot = slots_.emplace_back();
    slot.name = name;
    slot.catalog = std::move(catalog);
    for (size_t i = 0; i < parameters().size(); ++i) {
      const TensorRange& leaf = parameters()[i];
      const StoredTensor* const stored = FindState(slot.catalog, leaf.name);
      if (stored == nullptr) continue;
      auto dtype = TorchDtype(stored->info.dtype);
      if (!dtype.has_value()) {
        return absl::InvalidArgumentError(absl::StrCat(
            name, " of ", leaf.name, " is ", NameOf(stored->info.dtype),
            ", which LibTorch does not have"));
      }
      // As in PyTorch, states of floating-point parameters become of their
      // dtype.
      const c10::ScalarType own = leaf.values.scalar_type();
      if (c10::isFloatingType(own) && c10::isFloatingType(*dtype)) dtype = own;
      FSDP_ASSIGN_OR_RETURN(TensorRange state, StateFor(leaf, name, *dtype));
      states_[leaf.name].tensors[name] = state.values;
      places_by_leaf_[i].push_back({slots_.size() - 1, slot.targets.size()});
      slot.targets.push_back(std::move(state));
    }
    LoadPlanOptions options;
    options.strict = strict;
    options.aliases = &values_.model().aliases;
    FSDP_ASSIGN_OR_RETURN(
        LoadPlan plan, Annotate(PlanLoad(slot.catalog, slot.targets, options),
                                absl::StrCat("the optimizer's ", name)));
    slot.parts.resize(slot.targets.size());
    for (const StraightRead& read : plan.straight) {
      slot.parts[read.target].straight.push_back(read);
    }
    for (WholeRead& read : plan.whole) {
      slot.parts[read.target].whole.push_back(std::move(read));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<TensorRange> StateFor(const TensorRange& leaf,
                                       const std::string& slot,
                                       c10::ScalarType dtype) {
    FSDP_ASSIGN_OR_RETURN(TensorRange planned,
                          MakeState(leaf, dtype, c10::kMeta));
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

  TensorRange& TargetAt(Place place) {
    return slots_[place.slot].targets[place.target];
  }

  // Returns those whose state is still to be made, or the others.
  std::vector<Place> PlacesOf(absl::Span<const int> leaves, bool is_new) {
    std::vector<Place> places;
    for (const int leaf : leaves) {
      for (const Place& place : places_by_leaf_[leaf]) {
        if (TargetAt(place).values.is_meta() == is_new) {
          places.push_back(place);
        }
      }
    }
    return places;
  }

  // Bytes of a leaf's new states that exist beside old ones, or for a while.
  int64_t PassingBytes(int leaf) {
    const auto& named = parameters()[leaf];
    if (!MayRest(named.values) && present_.count(named.name) == 0) return 0;
    int64_t bytes = 0;
    for (const Place& place : places_by_leaf_[leaf]) {
      const at::Tensor& state = TargetAt(place).values;
      if (state.is_meta()) bytes += static_cast<int64_t>(state.nbytes());
    }
    return bytes;
  }

  absl::Status ReadPlaces(absl::Span<const Place> places, Read read) {
    std::vector<LoadPlan> plans(slots_.size());
    for (const Place& place : places) {
      LoadPlan& part = slots_[place.slot].parts[place.target];
      LoadPlan& plan = plans[place.slot];
      plan.straight.insert(plan.straight.end(), part.straight.begin(),
                           part.straight.end());
      plan.whole.insert(plan.whole.end(), part.whole.begin(), part.whole.end());
    }
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (plans[i].straight.empty() && plans[i].whole.empty()) continue;
      FSDP_RETURN_IF_ERROR(read(i, plans[i], slots_[i].targets));
    }
    return absl::OkStatus();
  }

  absl::Status FillBatch(absl::Span<const int> leaves, Read read) {
    const std::vector<Place> places = PlacesOf(leaves, /*is_new=*/true);
    std::vector<at::Tensor> shards;
    for (const int leaf : leaves) {
      shards.push_back(parameters()[leaf].values);
      for (const Place& place : places_by_leaf_[leaf]) {
        TensorRange& target = TargetAt(place);
        if (!target.values.is_meta()) continue;
        FSDP_ASSIGN_OR_RETURN(
            target, MakeState(parameters()[leaf], target.values.scalar_type(),
                              shards.back().device()));
        states_[target.name].tensors[slots_[place.slot].name] = target.values;
      }
    }
    FSDP_RETURN_IF_ERROR(ReadPlaces(places, read));
    for (size_t i = 0; i < leaves.size(); ++i) {
      const std::string& name = parameters()[leaves[i]].name;
      FSDP_RETURN_IF_ERROR(ApplyState(shards[i], states_[name], optimizer_));
      states_.erase(name);
      present_.erase(name);
    }
    // From here on the optimizer alone has them.
    for (const Place& place : places) {
      TargetAt(place).values.reset();
    }
    return places.empty() ? absl::OkStatus() : TakeUpStates(optimizer_, shards);
  }

  RunValues& values_;
  torch::optim::Optimizer& optimizer_;
  std::vector<Slot> slots_;
  std::map<std::string, OptimizerSlots> present_;  // by parameter, as states_
  // New states. Tensors that are still to be made are on c10::kMeta.
  std::map<std::string, OptimizerSlots> states_;
  std::set<std::pair<const void*, int64_t>> taken_;  // memory of states_
  OptimizerReplacement replacement_;
  std::vector<int> leaves_;  // that get a state
  std::vector<std::vector<Place>> places_by_leaf_;
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
    FSDP_RETURN_IF_ERROR(together_.Agree(
        TorchToStatus(kWhat, [this] { return Plan(); }), kWhat));
    FSDP_RETURN_IF_ERROR(together_.Agree(
        TorchToStatus(kWhat, [this] { return Fill(); }), kWhat));
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
      FSDP_ASSIGN_OR_RETURN(manifest_, ReadManifest(*context_.files, one.path));
      folder_.emplace(*context_.files, one.path, &manifest_.files);
    }
    if (folder_.has_value()) return absl::OkStatus();
    return absl::NotFoundError(absl::StrCat(
        context_.root, " has no checkpoint of step ", step_, "; it has ",
        steps_.empty() ? "none" : absl::StrJoin(steps_, ", ")));
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
      FSDP_ASSIGN_OR_RETURN(
          average_plan_, Annotate(PlanLoad(average_, average_targets_, options),
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
    const std::string buffers = BuffersFileName(together_.rank());
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
        ReaderOptionsFor(*values_, together_.world_size());
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
    FSDP_ASSIGN_OR_RETURN(reader_, folder_->Open(catalogs, options));
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
  const Together& together_;
  const int64_t step_;
  TrainingRun& run_;
  std::vector<int64_t> steps_;  // that there are
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

absl::StatusOr<std::vector<int64_t>> LoadRun(const LoadContext& context,
                                             int64_t step, TrainingRun& run) {
  return Loading(context, step, run).Load();
}

}  // namespace fsdp::checkpoint
