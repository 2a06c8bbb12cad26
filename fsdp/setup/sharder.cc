#include "fsdp/setup/sharder.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>
#endif

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/quantized/quantized_communicator.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/precision/precision_switch.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

// A piece of CommonFlats begins on a cache line.
constexpr int64_t kAlignment = 64;

using ::fsdp::flat_param::FlatParameter;

std::string FreedText(const Unit& unit) {
  return absl::StrCat(
      "the parameters of unit ", DisplayName(unit),
      " are sharded, and this rank holds only a part of them outside the "
      "unit's forward and backward. If this is a forward, let the parent call "
      "its child by fsdp::Forward(child, ...) instead of child->forward(...), "
      "or set Options::transparent, and keep what FullyShard() has returned. "
      "If it is a backward, a tensor that the unit computed was kept in a "
      "member and used elsewhere: return it as an output, too. To read or "
      "write values use Parameters(), "
      "Ranges() or "
      "ForEachFullParameter()");
}

// Divides before the sum if the group prefers scaled inputs, because it then
// adds them as they are. In fp16 this would lose small gradients. For hooks,
// which may reduce in fp16, the Runtime moves the factor behind the sum.
GradientScaling ScalingOf(const Options& options,
                          const comm::Communicator& world,
                          c10::ScalarType reduce_dtype) {
  const int ranks = world.world_size();
  const double factor = options.gradients.divide_factor.value_or(ranks);
  const bool all_before = world.PrefersScaledInputs() &&
                          reduce_dtype != c10::ScalarType::Half &&
                          !options.gradients.predivide_factor.has_value();
  if (all_before) return {1 / factor, 1, /*before_for_speed=*/true};
  const double before = options.gradients.predivide_factor.value_or(
      1 / MeanOver(ranks, reduce_dtype).before);
  return {1 / before, before / factor};
}

// Freed whole parameters leave holes between shards in the heap that do not fit
// the next unit's: together as much as the model.
void GiveBackFreedMemory() {
#ifdef __GLIBC__
  // Are malloc() and malloc_trim() of one library? With another malloc()
  // (jemalloc's, a sanitizer's), malloc_trim() would set up an unused heap,
  // which glibc cannot do on two threads at a time.
  static const bool trims_the_heap_in_use = [] {
    Dl_info malloc_info;
    Dl_info trim_info;
    return dladdr(dlsym(RTLD_DEFAULT, "malloc"), &malloc_info) != 0 &&
           dladdr(dlsym(RTLD_DEFAULT, "malloc_trim"), &trim_info) != 0 &&
           malloc_info.dli_fbase == trim_info.dli_fbase;
  }();
  if (trims_the_heap_in_use) malloc_trim(0);
#endif
}

}  // namespace

Sharder::Sharder(ShardPlan plan, const comm::Mesh& mesh, const Options& options,
                 absl::Duration timeout)
    : plan_(std::move(plan)),
      world_(*mesh.world()),
      placements_(mesh, options.quantize),
      options_(options),
      timeout_(timeout),
      initializer_(plan_.tree, options.init.module, options.init.seed) {}

absl::StatusOr<RuntimeUnit> Sharder::Shard(const PlannedUnit& planned) {
  RuntimeUnit result;
  result.name = DisplayName(planned.unit);
  if (has_values()) {
    FSDP_RETURN_IF_ERROR(initializer_.InitUsersOf(planned.unit));
  }
  FSDP_ASSIGN_OR_RETURN(result.placement, placements_.Of(planned.options));
  std::map<FlatKind, FlatParameters> by_kind = FlatsOf(plan_.tree, planned);
  for (const OwnedParameter& owned : planned.unit.parameters) {
    plan_.tree.parameters[owned.parameter].clear();
  }
  int64_t exact_tail = 0;
  for (auto& [kind, parameters] : by_kind) {
    const int index = next_flat_++;
    RuntimeFlat& flat = result.flats.emplace_back();
    flat.shared = {common_.Piece(index), kind.stored == kind.computed};
    FSDP_RETURN_IF_ERROR(
        MakeFlat(planned, index, kind, std::move(parameters), result));
    flat.gradients = GradientsOf(planned, kind);
    if (space_ != nullptr) {
      FSDP_ASSIGN_OR_RETURN(
          flat.gradients.memory,
          space_->PlaceGradients(
              index, ShardGradientBytes(flat->layout(), flat.gradients)));
    }
    exact_tail = std::max(
        exact_tail, GradientLayout::MostFlags(
                        flat->layout(), static_cast<int64_t>(c10::elementSize(
                                            flat.gradients.reduce_dtype))));
  }
  FSDP_RETURN_IF_ERROR(placements_.Quantize(exact_tail, result.placement));
  GiveBackFreedMemory();
  return result;
}

absl::Status Sharder::MakeOffloadSpace(
    const std::shared_ptr<comm::Communicator>& world) {
  if (!options_.offload.any()) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(std::vector<RestingFlat> flats, RestingFlats());
  absl::StatusOr<OffloadPlan> plan =
      PlanOffload(flats, options_.offload, DeviceOfModel().is_cpu());
  FSDP_RETURN_IF_ERROR(comm::Agree(world_, plan.status(), "planning offload",
                                   absl::Now() + timeout_));
  FSDP_ASSIGN_OR_RETURN(
      space_,
      OffloadSpace::Make(std::move(flats), *std::move(plan), options_.offload,
                         DeviceOfModel(), world, timeout_));
  return absl::OkStatus();
}

absl::Status Sharder::AllocateCommon() {
  int flat = 0;
  for (const PlannedUnit& planned : plan_.units) {
    FSDP_ASSIGN_OR_RETURN(const Placement placement,
                          placements_.Of(planned.options));
    for (const auto& [kind, parameters] : FlatsOf(plan_.tree, planned)) {
      const bool is_away =
          space_ != nullptr &&
          space_->plan().tier(flat, RestingKind::kParameters) != Tier::kDevice;
      ++flat;
      if (is_away || placements_.QuantizesGathers(placement)) {
        common_.AddNone();
        continue;
      }
      FSDP_ASSIGN_OR_RETURN(
          const flat_param::FlatLayout layout,
          LayoutOf(parameters, kind, placement.shard->world_size()));
      common_.Add(placement.shard,
                  layout.padded_numel() *
                      static_cast<int64_t>(c10::elementSize(kind.computed)));
    }
  }
  return options_.share_memory ? common_.Allocate() : absl::OkStatus();
}

absl::Status Sharder::FinishRest(torch::nn::Module& root) {
  if (has_values()) FSDP_RETURN_IF_ERROR(initializer_.InitTheRest());
  FSDP_RETURN_IF_ERROR(Materialize(root));
  if (!options_.init.broadcast) return absl::OkStatus();
  c10::NoGradGuard no_grad;
  for (const CastBuffer& buffer : plan_.buffers) {
    for (const at::Tensor& part : PartsOf(buffer.tensor)) {
      if (part.numel() == 0) continue;
      const at::Tensor distinct = DistinctOf(part);
      const at::Tensor values =
          distinct.resolve_conj().resolve_neg().contiguous();
      FSDP_RETURN_IF_ERROR(Broadcast(
          RangeOf(values, at::kByte, 0, static_cast<int64_t>(values.nbytes())),
          buffer.name));
      if (!values.is_same(distinct)) distinct.copy_(values);
    }
  }
  return absl::OkStatus();
}

bool Sharder::has_values() const {
  return !options_.init.broadcast || world_.rank() == 0;
}

GradientBufferOptions Sharder::GradientsOf(const PlannedUnit& planned,
                                           const FlatKind& kind) const {
  const GradientDtypes dtypes = GradientDtypesOf(planned, kind);
  return {dtypes.reduced, dtypes.of_shard,
          ScalingOf(options_, world_, dtypes.reduced)};
}

absl::Status Sharder::Broadcast(const at::Tensor& tensor,
                                const std::string& what) {
  return comm::BroadcastTensor(world_, tensor, /*root=*/0, what,
                               absl::Now() + timeout_);
}

bool Sharder::IsLoadedLater(const flat_param::NamedParameter& parameter) const {
  return options_.init.loaded_later &&
         options_.init.loaded_later(parameter.name);
}

// If the values are broadcast, only those of rank 0 are read.
at::Tensor Sharder::Flatten(const FlatParameters& parameters,
                            const flat_param::FlatLayout& layout,
                            bool is_broadcast) const {
  if (!is_broadcast || has_values()) {
    std::set<const void*> without;
    for (const flat_param::NamedParameter& parameter : parameters) {
      if (!IsLoadedLater(parameter)) continue;
      without.insert(parameter.tensors.front().unsafeGetTensorImpl());
    }
    return FlatParameter::Flatten(
        parameters, layout, [&without](const at::Tensor& tensor) {
          return without.count(tensor.unsafeGetTensorImpl()) > 0
                     ? at::Tensor()
                     : ValueOf(tensor);
        });
  }
  return at::zeros(
      {layout.padded_numel()},
      parameters.front().tensors.front().options().requires_grad(false));
}

c10::Device Sharder::DeviceOfModel() const {
  for (const auto& tensors : plan_.tree.parameters) {
    if (!tensors.empty()) return tensors.front().device();
  }
  return c10::Device(c10::kCPU);
}

// Returns the flats in the order in which units are sharded.
absl::StatusOr<std::vector<RestingFlat>> Sharder::RestingFlats() {
  std::vector<RestingFlat> flats;
  for (const PlannedUnit& planned : plan_.units) {
    FSDP_ASSIGN_OR_RETURN(const Placement placement,
                          placements_.Of(planned.options));
    for (const auto& [kind, parameters] : FlatsOf(plan_.tree, planned)) {
      FSDP_ASSIGN_OR_RETURN(
          const flat_param::FlatLayout layout,
          LayoutOf(parameters, kind, placement.shard->world_size()));
      RestingFlat& flat = flats.emplace_back();
      flat.name = DisplayName(planned.unit);
      flat.parameters = layout.shard_numel() *
                        static_cast<int64_t>(c10::elementSize(kind.stored));
      if (!AnyTrainable(parameters)) continue;
      flat.gradients = ShardGradientBytes(layout, GradientsOf(planned, kind));
      flat.optimizer =
          static_cast<int64_t>(options_.offload.optimizer_state *
                               static_cast<double>(flat.parameters));
    }
  }
  return flats;
}

// Returns where this rank's shard rests, or undefined for memory of its own.
absl::StatusOr<at::Tensor> Sharder::PlaceShard(
    int index, const flat_param::FlatLayout& layout, c10::ScalarType stored,
    RuntimeUnit& unit) {
  RuntimeFlat& flat = unit.flats.back();
  at::Tensor rest;
  if (flat.shared.holds_shards && flat.shared.memory.defined()) {
    const flat_param::Slice range =
        layout.ShardRange(unit.placement.shard->rank());
    rest = RangeOf(flat.shared.memory, stored, range.begin, range.numel());
  }
  if (space_ == nullptr) return rest;
  FSDP_ASSIGN_OR_RETURN(
      flat.resting,
      space_->PlaceParameters(
          index,
          layout.shard_numel() * static_cast<int64_t>(c10::elementSize(stored)),
          rest));
  return flat.resting->AsTensor(stored);
}

absl::Status Sharder::MakeFlat(const PlannedUnit& planned, int index,
                               const FlatKind& kind, FlatParameters parameters,
                               RuntimeUnit& unit) {
  const comm::Communicator& group = *unit.placement.shard;
  FSDP_ASSIGN_OR_RETURN(flat_param::FlatLayout layout,
                        LayoutOf(parameters, kind, group.world_size()));
  FSDP_ASSIGN_OR_RETURN(const at::Tensor rest,
                        PlaceShard(index, layout, kind.stored, unit));
  const bool is_broadcast = options_.init.broadcast &&
                            !std::all_of(parameters.begin(), parameters.end(),
                                         [this](const auto& parameter) {
                                           return IsLoadedLater(parameter);
                                         });
  at::Tensor flat;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(absl::StrCat("flattening unit ", unit.name),
                    [&] { flat = Flatten(parameters, layout, is_broadcast); }));
  if (is_broadcast) {
    FSDP_RETURN_IF_ERROR(Broadcast(flat, unit.name));
  }
  // Values that an earlier run has kept replace those of the module.
  const bool kept = space_ != nullptr && space_->step() > 0;
  FSDP_ASSIGN_OR_RETURN(
      const Resident resident,
      Resident::Of(rest, kept ? Use::kUpdate : Use::kOverwrite));
  const at::Tensor values = kept ? rest.clone() : at::Tensor();
  return TorchToStatus(absl::StrCat("sharding unit ", unit.name), [&] {
    unit.flats.back().parameter = std::make_unique<FlatParameter>(
        std::move(parameters), std::move(layout), flat, group.rank(),
        kind.computed, FreedText(planned.unit), rest);
    if (kept) rest.copy_(values);
  });
}

void CommonFlats::Add(std::shared_ptr<comm::Communicator> group,
                      int64_t bytes) {
  auto found = std::find_if(
      groups_.begin(), groups_.end(),
      [&](const Group& other) { return other.communicator == group; });
  if (found == groups_.end()) {
    groups_.emplace_back().communicator = std::move(group);
    found = std::prev(groups_.end());
  }
  ranges_.push_back(
      {static_cast<size_t>(found - groups_.begin()), found->bytes, bytes});
  found->bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

absl::Status CommonFlats::Allocate() {
  for (Group& group : groups_) {
    if (group.communicator->world_size() == 1) continue;  // its shard is all
    if (!group.communicator->HasCommonMemory()) continue;
    FSDP_ASSIGN_OR_RETURN(group.common,
                          group.communicator->AllocateCommon(group.bytes));
  }
  return absl::OkStatus();
}

at::Tensor CommonFlats::Piece(int number) const {
  const Range& range = ranges_[number];
  if (range.bytes < 0) return at::Tensor();
  const at::Tensor& memory = groups_[range.group].common.memory;
  if (!memory.defined()) return at::Tensor();
  return memory.narrow(0, range.begin, range.bytes);
}

std::vector<std::unique_ptr<comm::Fence>> CommonFlats::TakeFences() {
  std::vector<std::unique_ptr<comm::Fence>> fences;
  for (Group& group : groups_) {
    if (group.common.fence != nullptr) {
      fences.push_back(std::move(group.common.fence));
    }
  }
  return fences;
}

absl::StatusOr<Placement> Placements::Of(const UnitOptions& options) {
  Placement placement;
  Group replicate;
  switch (options.strategy) {
    case ShardingStrategy::kFullShard:
    case ShardingStrategy::kShardGradOp:
    case ShardingStrategy::kShardOptimizer:
      placement.shard = mesh_.world();
      break;
    case ShardingStrategy::kNoShard: {
      FSDP_ASSIGN_OR_RETURN(placement.shard, Split(mesh_.world(), 1));
      replicate = mesh_.world();
      break;
    }
    case ShardingStrategy::kHybridShard:
    case ShardingStrategy::kHybridShardGradOp:
      placement.shard = mesh_.group(1);
      replicate = mesh_.group(0);
      break;
  }
  if (replicate != nullptr && replicate->world_size() > 1) {
    placement.replicate = replicate;
  }
  const int part = options.backward_group_size.value_or(0);
  if (part > 0 && part < placement.shard->world_size()) {
    FSDP_ASSIGN_OR_RETURN(placement.part, Split(placement.shard, part));
  }
  return placement;
}

bool Placements::QuantizesGathers(const Placement& placement) const {
  return quantization_.gather && placement.shard->world_size() > 1;
}

absl::Status Placements::Quantize(int64_t exact_tail, Placement& placement) {
  if (!quantization_.any() || placement.shard->world_size() == 1) {
    return absl::OkStatus();
  }
  if (quantization_.reduce && !placement.shard->HasAllToAll()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Options::quantize.reduce: ", placement.shard->ToString(),
        " has no all-to-all, which such sums are made of: reduce exactly, or "
        "train over another backend"));
  }
  placement.quantization = quantization_.ForGroup(exact_tail);
  Group& result = quantized_[{placement.shard.get(), exact_tail}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::CreateQuantizedCommunicator(
                                      placement.shard, placement.quantization));
  }
  placement.quantized = result;
  return absl::OkStatus();
}

absl::StatusOr<Placements::Group> Placements::Split(const Group& group,
                                                    int size) {
  Group& result = split_[{group.get(), size}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::SplitConsecutive(group, size));
  }
  return result;
}

}  // namespace fsdp
