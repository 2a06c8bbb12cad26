#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "adapters/layers.h"
#include "adapters/linear.h"
#include "adapters/lora.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "device_ops/block_quantization.h"
#include "fsdp/deferred/deferred_init.h"

namespace fsdp::adapters {
namespace {

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

// Whatever else has a weight would find bytes.
absl::Status CheckWeightsAreTheirOwn(const torch::nn::Module& module,
                                     const Layers& layers) {
  std::map<const void*, std::string> owners;
  for (const auto& [name, layer] : layers) {
    owners[layer->weight.storage().unsafeGetStorageImpl()] = name;
  }
  const Layers all = LayersOf(module);  // also by further names
  for (const auto& item : module.named_parameters()) {
    const auto found =
        owners.find(item.value().storage().unsafeGetStorageImpl());
    if (found == owners.end()) continue;
    const auto& [storage, owner] = *found;
    const auto layer =
        all.find(std::string(absl::StripSuffix(item.key(), ".weight")));
    if (layer != all.end() && layer->second == layers.at(owner)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the weight of ", owner, " is also ", item.key(),
        ", which would find int8: name ", owner, " in Int8Options::kept"));
  }
  return absl::OkStatus();
}

}  // namespace

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
  FSDP_RETURN_IF_ERROR(CheckWeightsAreTheirOwn(module, layers));
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

}  // namespace fsdp::adapters
