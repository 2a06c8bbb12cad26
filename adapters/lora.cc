#include "adapters/lora.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "adapters/layers.h"
#include "adapters/linear.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/fully_sharded_data_parallel.h"

namespace fsdp::adapters {
namespace {

constexpr absl::string_view kFactorA = ".lora_A.weight";
constexpr absl::string_view kFactorB = ".lora_B.weight";

absl::StatusOr<Layers> TargetsOf(const torch::nn::Module& module,
                                 const LoraConfig& config) {
  const Layers all = LayersOf(module);
  const bool takes_all = config.targets == std::vector<std::string>{kAllLinear};
  if (!takes_all && config.target_pattern.empty()) {
    FSDP_RETURN_IF_ERROR(CheckNames(module, config.targets, "adapters of"));
  }
  Layers targets;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    const std::string& name = item.key();
    const auto layer = all.find(name);
    const bool is_target =
        takes_all ? layer != all.end() && !IsNamedBy(name, {"lm_head"})
                  : config.IsTarget(name);
    if (!is_target) continue;
    if (layer == all.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("an adapter of ", name, ", a ", item.value()->name(),
                       ": only an fsdp::adapters::Linear can have one"));
    }
    targets.insert(*layer);
  }
  if (targets.empty()) {
    return absl::InvalidArgumentError(
        "the model has no fsdp::adapters::Linear that could have an adapter");
  }
  return targets;
}

absl::Status MergeSharded(ShardedModuleBase& model, const Layers& layers) {
  const c10::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> factors;
  FSDP_RETURN_IF_ERROR(model.ForEachFullParameter(
      [&](const std::string& name, const at::Tensor& value) {
        if (IsFactor(name)) factors[name] = value.detach().clone();
        return absl::OkStatus();
      }));
  VisitOptions options;
  options.writeback = true;
  return model.ForEachFullParameter(
      [&](const std::string& name, const at::Tensor& value) {
        if (absl::EndsWith(name, kFactorB)) value.zero_();
        absl::string_view layer_name = name;
        if (!absl::ConsumeSuffix(&layer_name, ".weight")) {
          return absl::OkStatus();
        }
        const auto layer = layers.find(std::string(layer_name));
        if (layer == layers.end()) return absl::OkStatus();
        return TorchToStatus("merging adapters", [&] {
          AddProduct(value, factors.at(absl::StrCat(layer_name, kFactorA)),
                     factors.at(absl::StrCat(layer_name, kFactorB)),
                     layer->second->low_rank_scale());
        });
      },
      options);
}

}  // namespace

bool IsFactor(absl::string_view parameter) {
  // Also of a layer by itself, whose names have nothing in front.
  const std::string name = absl::StrCat(".", parameter);
  return absl::EndsWith(name, kFactorA) || absl::EndsWith(name, kFactorB);
}

absl::Status AddLora(torch::nn::Module& module, const LoraConfig& config) {
  FSDP_RETURN_IF_ERROR(Check(config));
  if (IsSharded(module)) {
    return absl::FailedPreconditionError(
        "the model is sharded: add adapters before FullyShard()");
  }
  if (!AdaptedLayers(module).empty()) {
    return absl::FailedPreconditionError("the model has adapters already");
  }
  FSDP_RETURN_IF_ERROR(
      CheckNames(module, config.trained_whole, "training whole"));
  FSDP_ASSIGN_OR_RETURN(const Layers targets, TargetsOf(module, config));
  // What is named may be a layer or a module around some.
  std::vector<at::Tensor> trained_whole;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (!IsNamedBy(item.key(), config.trained_whole)) continue;
    for (const at::Tensor& parameter : item.value()->parameters()) {
      if (!parameter.is_floating_point()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "training whole ", item.key(),
            ", whose weight is int8: name it in Int8Options::kept"));
      }
      trained_whole.push_back(parameter);
    }
  }
  return TorchToStatus("adding adapters", [&] {
    for (const at::Tensor& parameter : module.parameters()) {
      at::Tensor(parameter).set_requires_grad(false);
    }
    for (const auto& [name, layer] : targets) {
      const LoraConfig own = config.Of(name);
      LowRankOptions options;
      options.rank = own.rank;
      options.scale = own.Scale();
      options.dropout = own.dropout;
      layer->AddLowRank(options);
    }
    for (at::Tensor& parameter : trained_whole) {
      parameter.set_requires_grad(true);
    }
  });
}

absl::Status MergeLora(torch::nn::Module& module) {
  auto* const sharded = dynamic_cast<ShardedModuleBase*>(&module);
  const Layers layers = AdaptedLayers(Unwrapped(module));
  if (layers.empty()) {
    return absl::FailedPreconditionError("the model has no adapters");
  }
  const bool is_int8 = absl::c_any_of(layers, [](const auto& layer) {
    return layer.second->int8_rows().has_value();
  });
  if (sharded != nullptr && is_int8) {
    return absl::FailedPreconditionError(
        "merging adapters into the shards of an int8 base, which cannot hold "
        "the sum: SaveAdapter(), and LoadAdapter() into a model whose base is "
        "not int8, which can be merged");
  }
  if (sharded != nullptr) return MergeSharded(*sharded, layers);
  if (IsSharded(module)) {
    return absl::FailedPreconditionError(
        "the module is part of a sharded model: merge what FullyShard() has "
        "returned");
  }
  return TorchToStatus("merging adapters", [&] {
    for (const auto& [name, layer] : layers) layer->Merge();
  });
}

}  // namespace fsdp::adapters
