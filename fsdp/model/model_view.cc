#include "fsdp/model/model_view.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "comm/communicator.h"
#include "comm/quantized/quantized_communicator.h"
#include "flat_param/module_walk.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_parameters.h"
#include "fsdp/runtime/gradient_buffer.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/schedule/schedule.h"

namespace fsdp {
namespace {

FlatView ViewOfFlat(const Runtime& runtime, int unit, int i) {
  const GradientBufferOptions& gradients = runtime.gradients(unit)[i];
  const SharedFlat& shared = runtime.shared(unit, i);
  FlatView view;
  view.flat = runtime.flats(unit)[i].get();
  view.reduce_dtype = gradients.reduce_dtype;
  view.gradient_dtype = gradients.gradient_dtype;
  view.gradient_is_placed = gradients.memory != nullptr;
  view.reduce_buffer_bytes = runtime.reduce_buffer_bytes(unit, i);
  view.shard_gradient_bytes = runtime.shard_gradient_bytes(unit, i);
  view.takes_gradients = runtime.TakesGradients(unit, i);
  view.is_shared = shared.memory.defined();
  view.shares_shards = shared.holds_shards;
  return view;
}

std::optional<UnitHandle> AskOwners(const torch::nn::Module& module,
                                    const torch::nn::Module& below) {
  for (const auto& item : flat_param::RegisteredParameters(below)) {
    const ParameterOwner* owner = OwnerOf(item.value());
    if (owner == nullptr) continue;
    std::shared_ptr<ShardedModel> model = owner->model();
    if (model == nullptr) continue;
    const std::optional<int> unit = model->UnitOf(module);
    if (unit.has_value()) return UnitHandle(std::move(model), *unit);
  }
  for (const auto& child : below.children()) {
    std::optional<UnitHandle> found = AskOwners(module, *child);
    if (found.has_value()) return found;
  }
  return std::nullopt;
}

}  // namespace

ModelView ViewOf(const ShardedModel& model) {
  const Schedule& schedule = model.schedule_;
  const Runtime& runtime = *model.runtime_;
  ModelView view{{}, schedule.units(), schedule.options()};
  for (int unit = 0; unit < model.num_units(); ++unit) {
    const Placement& placement = runtime.placement(unit);
    UnitView& of_unit = view.units.emplace_back();
    of_unit.name = runtime.name(unit);
    of_unit.strategy = model.unit_options(unit).strategy;
    of_unit.parent = schedule.units()[unit].parent;
    of_unit.recomputed = model.recomputes(unit);
    of_unit.synchronizes = schedule.synchronizes(unit);
    of_unit.all_reduces = schedule.all_reduces(unit);
    of_unit.ranks = placement.shard->world_size();
    of_unit.part_ranks =
        placement.part == nullptr ? 0 : placement.part->world_size();
    if (placement.quantized != nullptr) {
      of_unit.quantization = placement.quantization;
    }
    of_unit.reduce_buffer_bytes = runtime.reduce_buffer_bytes(unit);
    for (int i = 0; i < runtime.num_flats(unit); ++i) {
      of_unit.flats.push_back(ViewOfFlat(runtime, unit, i));
    }
  }
  return view;
}

std::optional<UnitHandle> FindUnit(const torch::nn::Module& module) {
  std::optional<UnitHandle> found = AskOwners(module, module);
  if (found.has_value() && found->unit() == ShardedModel::kNoUnit) {
    return std::nullopt;
  }
  return found;
}

}  // namespace fsdp
