#include "fsdp/model/unit_handle.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <utility>

#include "flat_param/module_walk.h"
#include "fsdp/model/parameter_owner.h"

namespace fsdp {
namespace {

// Asks the models that own parameters of `below` until one knows `module`.
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

std::optional<UnitHandle> FindUnit(const torch::nn::Module& module) {
  std::optional<UnitHandle> found = AskOwners(module, module);
  if (found.has_value() && found->unit() == ShardedModel::kNoUnit) {
    return std::nullopt;
  }
  return found;
}

}  // namespace fsdp
