#include "fsdp/setup/sharder.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>

#ifdef __GLIBC__
#include <dlfcn.h>
#include <malloc.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "base/tensor_over.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/memory/buffer_layout.h"
#include "fsdp/memory/resting_memory.h"
#include "fsdp/model/precision_switch.h"
#include "fsdp/resting/offload_plan.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

// A piece of common memory begins on a cache line.
constexpr int64_t kAlignment = 64;

using ::fsdp::flat_param::FlatParameter;

std::string FreedText(const std::string& unit) {
  return absl::StrCat(
      "the parameters of unit ", unit,
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

class Sharder {
 public:
  Sharder(ShardPlan& plan, const comm::Mesh& mesh, const Options& options,
          absl::Duration timeout)
      : plan_(plan),
        mesh_(mesh),
        world_(*mesh.world()),
        options_(options),
        timeout_(timeout),
        initializer_(plan.tree, options.init.module, options.init.seed) {}

  // Splits groups, and lays units out over their ranks.
  absl::Status PlaceUnits();
  // Decides which tier everything rests in, and makes room there. An error is
  // the same on all ranks.
  absl::Status MakeOffloadSpace();
  absl::Status Shard(torch::nn::Module& root);

  ShardedUnits Take() {
    return {std::move(units_), std::move(fences_), std::move(space_)};
  }

 private:
  using Group = std::shared_ptr<comm::Communicator>;

  // Returns the groups of a unit, whose options have been checked. Collective.
  absl::StatusOr<Placement> PlacementOf(const UnitOptions& options);
  // Splits each group once, however many units use it.
  absl::StatusOr<Group> Split(const Group& group, int size);
  // Adds the quantised group to `placement`. `exact_tail` counts the last
  // elements of each rank's part of a sum, which stay exact.
  absl::Status Quantize(int64_t exact_tail, Placement& placement);
  // Allocates memory for whole parameters that the ranks of a host share: one
  // allocation for each group of ranks, cut into pieces.
  absl::Status AllocateCommon();
  absl::Status ShardUnit(size_t unit);
  // Makes the next flat parameter of `unit`, number next_flat_ of all.
  absl::Status MakeFlat(PlannedFlat planned, RuntimeUnit& unit);
  // Returns where this rank's shard rests, or undefined for memory of its own.
  absl::StatusOr<at::Tensor> PlaceShard(const PlannedFlat& planned,
                                        const Placement& placement,
                                        RuntimeFlat& flat);
  at::Tensor Flatten(const PlannedFlat& planned, bool is_broadcast) const;
  // Finishes what is in no unit.
  absl::Status FinishRest(torch::nn::Module& root);

  // Returns whether this rank's values are the ones that count.
  bool has_values() const {
    return !options_.init.broadcast || world_.rank() == 0;
  }
  absl::Status Broadcast(const at::Tensor& tensor, const std::string& what) {
    return comm::BroadcastTensor(world_, tensor, /*root=*/0, what,
                                 absl::Now() + timeout_);
  }

  ShardPlan& plan_;
  const comm::Mesh& mesh_;
  comm::Communicator& world_;
  const Options& options_;
  const absl::Duration timeout_;
  ModuleInitializer initializer_;
  std::map<std::pair<const void*, int>, Group> split_;
  std::map<std::pair<const void*, int64_t>, Group> quantized_;
  std::shared_ptr<OffloadSpace> space_;  // null: nothing is offloaded
  std::vector<RuntimeUnit> units_;
  std::vector<std::vector<PlannedFlat>> flats_;  // by unit, until it is sharded
  // A piece for each flat parameter, uint8; undefined if there is none.
  std::vector<at::Tensor> common_;
  std::vector<std::unique_ptr<comm::Fence>> fences_;
  int next_flat_ = 0;
};

absl::Status Sharder::PlaceUnits() {
  for (const PlannedUnit& planned : plan_.units) {
    RuntimeUnit& unit = units_.emplace_back();
    unit.name = DisplayName(planned.unit);
    FSDP_ASSIGN_OR_RETURN(unit.placement, PlacementOf(planned.options));
    FSDP_ASSIGN_OR_RETURN(
        flats_.emplace_back(),
        PlanFlats(plan_.tree, planned, unit.placement.shard->world_size()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Placement> Sharder::PlacementOf(const UnitOptions& options) {
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

absl::StatusOr<Sharder::Group> Sharder::Split(const Group& group, int size) {
  Group& result = split_[{group.get(), size}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::SplitConsecutive(group, size));
  }
  return result;
}

absl::Status Sharder::Quantize(int64_t exact_tail, Placement& placement) {
  const Quantization& quantization = options_.quantize;
  if (!quantization.any() || placement.shard->world_size() == 1) {
    return absl::OkStatus();
  }
  if (quantization.reduce && !placement.shard->HasAllToAll()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Options::quantize.reduce: ", placement.shard->ToString(),
        " has no all-to-all, which such sums are made of: reduce exactly, or "
        "train over another backend"));
  }
  placement.quantization = quantization.ForGroup(exact_tail);
  Group& result = quantized_[{placement.shard.get(), exact_tail}];
  if (result == nullptr) {
    FSDP_ASSIGN_OR_RETURN(result, comm::CreateQuantizedCommunicator(
                                      placement.shard, placement.quantization));
  }
  placement.quantized = result;
  return absl::OkStatus();
}

absl::Status Sharder::MakeOffloadSpace() {
  if (!options_.offload.any()) return absl::OkStatus();
  const c10::Device device = plan_.tree.parameters.front().front().device();
  std::vector<RestingFlat> resting =
      RestingFlatsOf(plan_, flats_, options_.offload);
  absl::StatusOr<OffloadPlan> plan =
      PlanOffload(resting, options_.offload, device.is_cpu());
  FSDP_RETURN_IF_ERROR(comm::Agree(world_, plan.status(), "planning offload",
                                   absl::Now() + timeout_));
  FSDP_ASSIGN_OR_RETURN(
      space_,
      OffloadSpace::Make(std::move(resting), *std::move(plan), options_.offload,
                         device, mesh_.world(), timeout_));
  return absl::OkStatus();
}

absl::Status Sharder::Shard(torch::nn::Module& root) {
  FSDP_RETURN_IF_ERROR(AllocateCommon());
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    FSDP_RETURN_IF_ERROR(ShardUnit(unit));
  }
  return FinishRest(root);
}

absl::Status Sharder::AllocateCommon() {
  struct Piece {
    size_t flat;
    int64_t begin;
    int64_t bytes;
  };
  struct Common {
    comm::Communicator* group;
    int64_t bytes = 0;
    std::vector<Piece> pieces = {};
  };
  std::vector<Common> commons;  // in the order in which units need them
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    comm::Communicator& group = *units_[unit].placement.shard;
    // A group of one rank needs none: its shard is all.
    const bool shares = options_.share_memory && !options_.quantize.gather &&
                        group.world_size() > 1 && group.HasCommonMemory();
    for (const PlannedFlat& flat : flats_[unit]) {
      const size_t index = common_.size();
      common_.emplace_back();
      if (!shares ||
          (space_ != nullptr &&
           space_->plan().tier(static_cast<int>(index),
                               RestingKind::kParameters) != Tier::kDevice)) {
        continue;
      }
      auto common = absl::c_find_if(
          commons, [&](const Common& each) { return each.group == &group; });
      if (common == commons.end()) common = commons.insert(common, {&group});
      common->pieces.push_back({index, common->bytes, flat.whole_bytes()});
      common->bytes +=
          (flat.whole_bytes() + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  for (const Common& common : commons) {
    FSDP_ASSIGN_OR_RETURN(comm::CommonMemory allocated,
                          common.group->AllocateCommon(common.bytes));
    if (allocated.fence != nullptr) {
      fences_.push_back(std::move(allocated.fence));
    }
    if (!allocated.memory.defined()) continue;
    for (const Piece& piece : common.pieces) {
      common_[piece.flat] =
          allocated.memory.narrow(0, piece.begin, piece.bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status Sharder::ShardUnit(size_t index) {
  const Unit& planned = plan_.units[index].unit;
  RuntimeUnit& unit = units_[index];
  if (has_values()) FSDP_RETURN_IF_ERROR(initializer_.InitUsersOf(planned));
  for (const OwnedParameter& owned : planned.parameters) {
    plan_.tree.parameters[owned.parameter].clear();
  }
  int64_t exact_tail = 0;
  for (PlannedFlat& flat : flats_[index]) {
    exact_tail = std::max(
        exact_tail,
        GradientLayout::MostFlags(
            flat.layout, static_cast<int64_t>(c10::elementSize(flat.reduced))));
    FSDP_RETURN_IF_ERROR(MakeFlat(std::move(flat), unit));
  }
  flats_[index].clear();
  FSDP_RETURN_IF_ERROR(Quantize(exact_tail, unit.placement));
  GiveBackFreedMemory();
  return absl::OkStatus();
}

absl::Status Sharder::MakeFlat(PlannedFlat planned, RuntimeUnit& unit) {
  RuntimeFlat& flat = unit.flats.emplace_back();
  flat.shared = common_[next_flat_];
  flat.gradients = {planned.reduced, planned.of_shard,
                    ScalingOf(options_, world_, planned.reduced)};
  FSDP_ASSIGN_OR_RETURN(const at::Tensor rest,
                        PlaceShard(planned, unit.placement, flat));
  const bool is_broadcast =
      options_.init.broadcast &&
      !absl::c_all_of(planned.parameters, [this](const auto& parameter) {
        return plan_.loaded_later.count(parameter.name) > 0;
      });
  at::Tensor whole;
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(absl::StrCat("flattening unit ", unit.name),
                    [&] { whole = Flatten(planned, is_broadcast); }));
  if (is_broadcast) FSDP_RETURN_IF_ERROR(Broadcast(whole, unit.name));
  // Values that an earlier run has kept replace those of the module.
  const bool kept = space_ != nullptr && space_->step() > 0;
  FSDP_ASSIGN_OR_RETURN(
      const Resident resident,
      Resident::Of(rest, kept ? Use::kUpdate : Use::kOverwrite));
  const at::Tensor values = kept ? rest.clone() : at::Tensor();
  const int64_t gradient_bytes = planned.shard_gradient_bytes();
  FSDP_RETURN_IF_ERROR(
      TorchToStatus(absl::StrCat("sharding unit ", unit.name), [&] {
        flat.parameter = std::make_unique<FlatParameter>(
            std::move(planned.parameters), std::move(planned.layout), whole,
            unit.placement.shard->rank(), planned.computed,
            FreedText(unit.name), rest);
        if (kept) rest.copy_(values);
      }));
  if (space_ != nullptr) {
    FSDP_ASSIGN_OR_RETURN(flat.gradients.memory,
                          space_->PlaceGradients(next_flat_, gradient_bytes));
  }
  ++next_flat_;
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> Sharder::PlaceShard(const PlannedFlat& planned,
                                               const Placement& placement,
                                               RuntimeFlat& flat) {
  at::Tensor rest;
  if (flat.shared.defined() && planned.stored == planned.computed) {
    const flat_param::Slice range =
        planned.layout.ShardRange(placement.shard->rank());
    rest = RangeOf(flat.shared, planned.stored, range.begin, range.numel());
  }
  if (space_ == nullptr) return rest;
  FSDP_ASSIGN_OR_RETURN(
      flat.resting,
      space_->PlaceParameters(next_flat_, planned.shard_bytes(), rest));
  return flat.resting->AsTensor(planned.stored);
}

// If the values are broadcast, only those of rank 0 are read.
at::Tensor Sharder::Flatten(const PlannedFlat& planned,
                            bool is_broadcast) const {
  const std::vector<flat_param::NamedParameter>& parameters =
      planned.parameters;
  if (is_broadcast && !has_values()) {
    return at::zeros(
        {planned.layout.padded_numel()},
        parameters.front().tensors.front().options().requires_grad(false));
  }
  std::set<const void*> without;
  for (const flat_param::NamedParameter& parameter : parameters) {
    if (plan_.loaded_later.count(parameter.name) == 0) continue;
    without.insert(parameter.tensors.front().unsafeGetTensorImpl());
  }
  return FlatParameter::Flatten(
      parameters, planned.layout, [&without](const at::Tensor& tensor) {
        return without.count(tensor.unsafeGetTensorImpl()) > 0
                   ? at::Tensor()
                   : ValueOf(tensor);
      });
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

}  // namespace

absl::StatusOr<ShardedUnits> ShardUnits(ShardPlan& plan,
                                        torch::nn::Module& root,
                                        const comm::Mesh& mesh,
                                        const Options& options,
                                        absl::Duration timeout) {
  Sharder sharder(plan, mesh, options, timeout);
  const auto shard = [&mesh](absl::FunctionRef<absl::Status()> call) {
    absl::Status status = TorchToStatus("sharding the model", call);
    if (!status.ok()) mesh.Abort(status);
    return status;
  };
  FSDP_RETURN_IF_ERROR(shard([&] { return sharder.PlaceUnits(); }));
  FSDP_RETURN_IF_ERROR(sharder.MakeOffloadSpace());
  FSDP_RETURN_IF_ERROR(shard([&] { return sharder.Shard(root); }));
  return sharder.Take();
}

}  // namespace fsdp
