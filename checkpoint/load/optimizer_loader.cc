#include "checkpoint/load/optimizer_loader.h"

#include <c10/core/Layout.h>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/load/tensor_loader.h"
#include "fsdp/memory/resting_memory.h"

namespace fsdp::checkpoint {
namespace {

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

// As in PyTorch, states of floating-point parameters become of their dtype.
c10::ScalarType StateDtype(c10::ScalarType stored, const at::Tensor& shard) {
  const c10::ScalarType own = shard.scalar_type();
  return c10::isFloatingType(own) && c10::isFloatingType(stored) ? own : stored;
}

bool MayRest(const at::Tensor& shard) {
  return RestingMemory::Of(shard) != nullptr;
}

// Parameters that are not sharded are none's.
int UnitOf(const TensorRange& leaf) { return leaf.is_whole ? -1 : leaf.unit; }

}  // namespace

// Tied parameters have the names that this model calls them by, whichever of
// theirs the checkpoint has.
void OptimizerLoader::UseFirstNames(TrainingRecord& record) const {
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
const StoredTensor* OptimizerLoader::FindState(
    const Catalog& catalog, const std::string& parameter) const {
  const StoredTensor* found = catalog.Find(parameter);
  for (const auto& [alias, name] : values_.model().aliases) {
    if (found != nullptr) break;
    if (name == parameter) found = catalog.Find(alias);
  }
  return found;
}

absl::Status OptimizerLoader::Plan(ReadSlot read_slot, TrainingRecord& record,
                                   bool strict) {
  UseFirstNames(record);
  for (const auto& [parameter, numbers] : record.numbers) {
    states_[parameter].numbers = numbers;
  }
  present_ = values_.ReleaseStates();
  places_by_leaf_.resize(parameters().size());
  for (const std::string& name : record.slots) {
    FSDP_ASSIGN_OR_RETURN(Catalog catalog, read_slot(name));
    FSDP_RETURN_IF_ERROR(PlanSlot(name, std::move(catalog), strict));
  }
  // What does not fit is said before anything is read.
  FSDP_ASSIGN_OR_RETURN(
      replacement_,
      PlanReplacement(parameters(), optimizer_, *values_.optimizer(), states_,
                      *record.groups, strict));
  KeepStepped();
  return absl::OkStatus();
}

absl::Status OptimizerLoader::PlanSlot(const std::string& name, Catalog catalog,
                                       bool strict) {
  Slot& slot = slots_.emplace_back();
  slot.name = name;
  slot.catalog = std::move(catalog);
  for (size_t i = 0; i < parameters().size(); ++i) {
    const TensorRange& leaf = parameters()[i];
    const StoredTensor* const stored = FindState(slot.catalog, leaf.name);
    if (stored == nullptr) continue;
    const auto dtype = TorchDtype(stored->info.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name, " of ", leaf.name, " is ", NameOf(stored->info.dtype),
          ", which LibTorch does not have"));
    }
    FSDP_ASSIGN_OR_RETURN(
        TensorRange state,
        StateFor(leaf, name, StateDtype(*dtype, leaf.values)));
    states_[leaf.name].tensors[name] = state.values;
    places_by_leaf_[i].push_back({slots_.size() - 1, slot.targets.size()});
    slot.targets.push_back(std::move(state));
  }
  LoadPlanOptions options;
  options.strict = strict;
  options.aliases = &values_.model().aliases;
  absl::StatusOr<LoadPlan> plan = PlanLoad(slot.catalog, slot.targets, options);
  if (!plan.ok()) {
    return Annotate(plan.status(), absl::StrCat("the optimizer's ", name));
  }
  slot.parts.resize(slot.targets.size());
  for (const StraightRead& read : plan->straight) {
    slot.parts[read.target].straight.push_back(read);
  }
  for (WholeRead& read : plan->whole) {
    slot.parts[read.target].whole.push_back(std::move(read));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorRange> OptimizerLoader::StateFor(const TensorRange& leaf,
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

// Leaves that the optimizer does not step get no state.
void OptimizerLoader::KeepStepped() {
  std::set<const void*> stepped;
  for (const auto& [leaf, state] : replacement_.states) stepped.insert(leaf);
  for (size_t i = 0; i < places_by_leaf_.size(); ++i) {
    const at::Tensor& shard = parameters()[i].values;
    if (stepped.count(shard.unsafeGetTensorImpl()) > 0) {
      leaves_.push_back(static_cast<int>(i));
    }
  }
}

std::vector<const Catalog*> OptimizerLoader::Catalogs() const {
  std::vector<const Catalog*> catalogs;
  catalogs.reserve(slots_.size());
  for (const Slot& slot : slots_) catalogs.push_back(&slot.catalog);
  return catalogs;
}

int64_t OptimizerLoader::bytes() const {
  int64_t bytes = 0;
  for (const int leaf : leaves_) {
    for (const Place& place : places_by_leaf_[leaf]) {
      bytes += BytesOf(slots_[place.slot].parts[place.target]);
    }
  }
  return bytes;
}

std::vector<OptimizerLoader::Place> OptimizerLoader::PlacesOf(
    absl::Span<const int> leaves, bool is_new) {
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

int64_t OptimizerLoader::PassingBytes(int leaf) {
  const auto& named = parameters()[leaf];
  if (!MayRest(named.values) && present_.count(named.name) == 0) return 0;
  int64_t bytes = 0;
  for (const Place& place : places_by_leaf_[leaf]) {
    const at::Tensor& state = TargetAt(place).values;
    if (state.is_meta()) bytes += static_cast<int64_t>(state.nbytes());
  }
  return bytes;
}

absl::Status OptimizerLoader::ReadPlaces(absl::Span<const Place> places,
                                         Read read) {
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

absl::Status OptimizerLoader::FillBatch(absl::Span<const int> leaves,
                                        Read read) {
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

absl::Status OptimizerLoader::Fill(Read read) {
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

}  // namespace fsdp::checkpoint
