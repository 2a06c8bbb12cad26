#include "adapters/lora.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>

#include "absl/algorithm/container.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "adapters/linear.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "device_ops/block_quantization.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/state/model_values.h"

namespace fsdp::adapters {
namespace {

// The layers that can have adapters, by name. One with several names has an
// entry for each.
using Layers = std::map<std::string, LinearImpl*>;

Layers LayersOf(const torch::nn::Module& module) {
  Layers layers;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (auto* const layer = item.value()->as<LinearImpl>()) {
      layers[item.key()] = layer;
    }
  }
  return layers;
}

// Returns the model that FullyShard() was given, if `module` is its result.
const torch::nn::Module& Unwrapped(const torch::nn::Module& module) {
  const bool is_wrapper =
      dynamic_cast<const ShardedModuleBase*>(&module) != nullptr;
  return is_wrapper ? *module.children().front() : module;
}

constexpr absl::string_view kFactorA = ".lora_A.weight";
constexpr absl::string_view kFactorB = ".lora_B.weight";

Layers AdaptedLayers(const torch::nn::Module& module) {
  Layers layers = LayersOf(module);
  for (auto it = layers.begin(); it != layers.end();) {
    it = it->second->has_low_rank() ? std::next(it) : layers.erase(it);
  }
  return layers;
}

// Returns whether `module` is what FullyShard() was given, or a part of that.
bool IsSharded(const torch::nn::Module& module) {
  return absl::c_any_of(module.parameters(), IsOfShardedModel);
}

// InvalidArgument: one of `names` names no module, by IsNamedBy(). Its text
// begins with `what`, the purpose of the names.
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

// Returns whether two parameters share numbers. Those of a sharded unit share a
// storage without that.
bool Overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage()) return false;
  return a.storage().unsafeGetStorageImpl() ==
             b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() < b.storage_offset() + b.numel() &&
         b.storage_offset() < a.storage_offset() + a.numel();
}

// Returns OK if nothing else in `module` has the weight of one of `layers`,
// otherwise an error of `code`, whose text goes on with `what_follows` after
// the names.
absl::Status CheckWeightsAreTheirOwn(
    const torch::nn::Module& module, const Layers& layers,
    absl::StatusCode code,
    absl::FunctionRef<std::string(absl::string_view owner)> what_follows) {
  const Layers all = LayersOf(module);  // also by further names
  for (const auto& item : module.named_parameters()) {
    const auto owner = absl::c_find_if(layers, [&](const auto& layer) {
      return Overlap(layer.second->weight, item.value());
    });
    if (owner == layers.end()) continue;
    const auto layer =
        all.find(std::string(absl::StripSuffix(item.key(), ".weight")));
    if (layer != all.end() && layer->second == owner->second) continue;
    return absl::Status(
        code, absl::StrCat("the weight of ", owner->first, " is also ",
                           item.key(), what_follows(owner->first)));
  }
  return absl::OkStatus();
}

absl::Status MergeSharded(ShardedModuleBase& model, const Layers& layers) {
  for (const auto& [name, layer] : layers) {
    for (const auto& item : layer->named_parameters()) {
      if (item.key() == "bias" || IsOfShardedModel(item.value())) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "merging the adapter of ", name, ", whose ", item.key(),
          " is not sharded (Options::ignore): keep the adapters apart, by "
          "SaveAdapter()"));
    }
  }
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

// Those that become int8, each by one name. Empty ones have nothing to scale.
absl::StatusOr<Layers> LayersToQuantize(const torch::nn::Module& module,
                                        const std::vector<std::string>& kept) {
  std::map<LinearImpl*, std::string> names;
  std::set<LinearImpl*> left;
  for (const auto& [name, layer] : LayersOf(module)) {
    names.try_emplace(layer, name);
    if (IsNamedBy(name, kept)) left.insert(layer);
  }
  Layers layers;
  for (const auto& [layer, name] : names) {
    if (left.count(layer) > 0 || layer->weight.numel() == 0) continue;
    layers[name] = layer;
  }
  if (!layers.empty()) return layers;
  return absl::InvalidArgumentError(
      "the model has no fsdp::adapters::Linear that could be int8");
}

}  // namespace

bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names) {
  return absl::c_any_of(names, [name](const std::string& one) {
    return name == one || absl::EndsWith(name, absl::StrCat(".", one));
  });
}

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
      if (layer->has_low_rank()) continue;  // by another name
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
  FSDP_RETURN_IF_ERROR(CheckWeightsAreTheirOwn(
      Unwrapped(module), layers, absl::StatusCode::kFailedPrecondition,
      [](absl::string_view) {
        return ", which would change with it: keep the adapters apart, by "
               "SaveAdapter()";
      }));
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

absl::Status QuantizeBase(torch::nn::Module& module,
                          const Int8Options& options) {
  if (options.block < 1 || options.block > device_ops::kMaxBlock) {
    return absl::InvalidArgumentError(
        absl::StrCat("an int8 base in blocks of ", options.block,
                     ": take a number from 1 to ", device_ops::kMaxBlock));
  }
  if (options.kept != Int8Options().kept) {  // which need not be there
    FSDP_RETURN_IF_ERROR(
        CheckNames(module, options.kept, "an int8 base without"));
  }
  if (IsSharded(module)) {
    return absl::FailedPreconditionError(
        "the model is sharded: call QuantizeBase() before FullyShard()");
  }
  for (const auto& [name, layer] : LayersOf(module)) {
    if (layer->has_low_rank()) {
      return absl::FailedPreconditionError(
          "the model has adapters: call QuantizeBase() before AddLora()");
    }
    if (layer->int8_rows().has_value()) {
      return absl::FailedPreconditionError("the model's base is int8 already");
    }
  }
  FSDP_ASSIGN_OR_RETURN(const Layers layers,
                        LayersToQuantize(module, options.kept));
  FSDP_RETURN_IF_ERROR(CheckWeightsAreTheirOwn(
      module, layers, absl::StatusCode::kInvalidArgument,
      [](absl::string_view owner) {
        return absl::StrCat(", which would find int8: name ", owner,
                            " in Int8Options::kept");
      }));
  // What has no values yet would get them for the check.
  if (!DeferredInit::IsActive()) {
    for (const auto& [name, layer] : layers) {
      bool is_finite = true;
      FSDP_RETURN_IF_ERROR(
          TorchToStatus("looking at a weight", [&, &layer = layer] {
            const auto [least, greatest] = layer->weight.detach().aminmax();
            // Scales are float32.
            is_finite = std::isfinite(least.item<float>()) &&
                        std::isfinite(greatest.item<float>());
          }));
      if (is_finite) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the weight of ", name,
                       " has a NaN or an infinity, which int8 has not"));
    }
  }
  return TorchToStatus("making a base int8", [&, &layers = layers] {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, layer] : layers) layer->Quantize(options.block);
  });
}

checkpoint::TensorMapping OfBaseModel(const torch::nn::Module& model) {
  std::map<std::string, checkpoint::RowConversion> conversions;
  for (const auto& [name, layer] : LayersOf(Unwrapped(model))) {
    if (!layer->int8_rows().has_value()) continue;
    const Int8Rows layout = *layer->int8_rows();
    checkpoint::RowConversion& conversion =
        conversions[absl::StrCat(name, ".weight")];
    conversion.sizes = {layer->weight.size(0), layout.numel};
    conversion.convert =
        [layout](const at::Tensor& rows) -> absl::StatusOr<at::Tensor> {
      const at::Tensor packed = Pack(layout, rows);
      if (ScalesOf(layout, packed).isfinite().all().item<bool>()) return packed;
      return absl::InvalidArgumentError(
          "a NaN or an infinity, which int8 has not");
    };
  }
  return
      [conversions = std::move(conversions)](
          const std::string& name) -> std::optional<checkpoint::TensorRecipe> {
        if (IsFactor(name)) return std::nullopt;
        auto recipe = checkpoint::TensorRecipe::Of(name);
        const auto found = conversions.find(name);
        if (found != conversions.end()) recipe.conversion = found->second;
        return recipe;
      };
}

}  // namespace fsdp::adapters
