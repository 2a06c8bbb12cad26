#include "adapters/layers.h"

#include <torch/nn/module.h>

#include <iterator>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "adapters/linear.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/state/model_values.h"

namespace fsdp::adapters {

Layers LayersOf(const torch::nn::Module& module) {
  Layers layers;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (auto* const layer = item.value()->as<LinearImpl>()) {
      layers[item.key()] = layer;
    }
  }
  return layers;
}

Layers AdaptedLayers(const torch::nn::Module& module) {
  Layers layers = LayersOf(module);
  for (auto it = layers.begin(); it != layers.end();) {
    it = it->second->has_low_rank() ? std::next(it) : layers.erase(it);
  }
  return layers;
}

const torch::nn::Module& Unwrapped(const torch::nn::Module& module) {
  const bool is_wrapper =
      dynamic_cast<const ShardedModuleBase*>(&module) != nullptr;
  return is_wrapper ? *module.children().front() : module;
}

bool IsSharded(const torch::nn::Module& module) {
  return absl::c_any_of(module.parameters(), IsOfShardedModel);
}

bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names) {
  return absl::c_any_of(names, [name](const std::string& one) {
    return name == one || absl::EndsWith(name, absl::StrCat(".", one));
  });
}

absl::Status CheckNames(const torch::nn::Module& module,
                        const std::vector<std::string>& names,
                        absl::string_view what) {
  std::vector<std::string> strangers;
  const auto modules = module.named_modules("", /*include_self=*/false);
  for (const std::string& name : names) {
    const bool is_there = absl::c_any_of(modules, [&](const auto& item) {
      return IsNamedBy(item.key(), {name});
    });
    if (!is_there) strangers.push_back(name);
  }
  if (strangers.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " ", absl::StrJoin(strangers, ", "),
                   ": the model has no module of that name"));
}

}  // namespace fsdp::adapters
