#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "adapters/layers.h"
#include "adapters/linear.h"
#include "adapters/lora.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"

namespace fsdp::adapters {
namespace {

using checkpoint::TensorRecipe;

constexpr char kConfigName[] = "adapter_config.json";
constexpr char kStem[] = "adapter_model";
// The model inside PEFT's own modules.
constexpr char kPrefix[] = "base_model.model.";
constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;

// Nothing: it is the base model's.
std::optional<std::string> NameInFile(absl::string_view name,
                                      const LoraConfig& config) {
  bool is_trained = IsFactor(name);
  for (size_t dot = name.find('.');
       !is_trained && dot != absl::string_view::npos;
       dot = name.find('.', dot + 1)) {
    is_trained = IsNamedBy(name.substr(0, dot), config.trained_whole);
  }
  if (!is_trained) return std::nullopt;
  return absl::StrCat(kPrefix, name);
}

checkpoint::RowConversion ToInt8(const LinearImpl& layer) {
  const Int8Rows layout = *layer.int8_rows();
  checkpoint::RowConversion conversion;
  conversion.sizes = {layer.weight.size(0), layout.numel};
  conversion.convert =
      [layout](const at::Tensor& rows) -> absl::StatusOr<at::Tensor> {
    const at::Tensor packed = Pack(layout, rows);
    if (ScalesOf(layout, packed).isfinite().all().item<bool>()) return packed;
    return absl::InvalidArgumentError(
        "a NaN or an infinity, which int8 has not");
  };
  return conversion;
}

// Before memory is taken for factors that the file does not have.
absl::Status CheckFitsFile(const LoraConfig& config, const std::string& folder,
                           checkpoint::FileSystem& files) {
  const checkpoint::SourceFolder source(files, folder, /*sums=*/nullptr);
  FSDP_ASSIGN_OR_RETURN(const auto catalog, source.ReadModel());
  int64_t rank = 0;
  for (const auto& tensor : catalog.tensors()) {
    const auto& [file_name, dtype, shape] = tensor.info;
    if (!absl::EndsWith(file_name, "lora_A.weight") || shape.empty()) continue;
    rank = std::max(rank, shape[0]);
  }
  auto most = static_cast<double>(config.rank);
  for (const auto& [name, of_some] : config.ranks) {
    most = std::max(most, of_some);
  }
  if (most <= static_cast<double>(rank)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("r is ", most, ", and the factors beside it have ", rank,
                   ": it is another adapter's"));
}

}  // namespace

absl::StatusOr<LoraConfig> ReadLoraConfig(const std::string& folder,
                                          checkpoint::FileSystem* files) {
  const std::string path = checkpoint::JoinPath(folder, kConfigName);
  FSDP_ASSIGN_OR_RETURN(
      const std::string text,
      checkpoint::ReadFile(checkpoint::OrReal(files), path, kMaxConfigBytes));
  absl::StatusOr<LoraConfig> config = ParseLoraConfig(text);
  FSDP_RETURN_IF_ERROR(Annotate(config.status(), path));
  FSDP_RETURN_IF_ERROR(Annotate(
      CheckFitsFile(*config, folder, checkpoint::OrReal(files)), path));
  return config;
}

absl::Status SaveAdapter(const std::string& folder, torch::nn::Module& model,
                         const LoraConfig& config,
                         const checkpoint::ExportOptions& options) {
  FSDP_RETURN_IF_ERROR(Check(config));
  checkpoint::ExportOptions adapter = options;
  adapter.stem = kStem;
  adapter.names = [&config](const std::string& name) {
    return NameInFile(name, config);
  };
  adapter.texts[kConfigName] = ToJson(config);
  return checkpoint::ExportModel(folder, model, adapter);
}

absl::Status LoadAdapter(const std::string& folder, torch::nn::Module& model,
                         const LoraConfig& config,
                         const checkpoint::LoadModelOptions& options) {
  checkpoint::LoadModelOptions adapter = options;
  std::string path =
      checkpoint::JoinPath(folder, absl::StrCat(kStem, ".safetensors"));
  const bool is_checkpoint =
      !checkpoint::Exists(checkpoint::OrReal(options.files), path)
           .value_or(true);
  if (is_checkpoint) path = folder;
  adapter.mapping =
      [&config,
       is_checkpoint](const std::string& name) -> std::optional<TensorRecipe> {
    const std::optional<std::string> in_file = NameInFile(name, config);
    if (!in_file.has_value()) return std::nullopt;
    return TensorRecipe::Of(is_checkpoint ? name : *in_file);
  };
  return checkpoint::LoadModel(path, model, adapter);
}

checkpoint::TensorMapping OfBaseModel(const torch::nn::Module& model) {
  std::map<std::string, checkpoint::RowConversion> conversions;
  for (const auto& [name, layer] : LayersOf(Unwrapped(model))) {
    if (!layer->int8_rows().has_value()) continue;
    conversions[absl::StrCat(name, ".weight")] = ToInt8(*layer);
  }
  return [conversions = std::move(conversions)](
             const std::string& name) -> std::optional<TensorRecipe> {
    if (IsFactor(name)) return std::nullopt;
    TensorRecipe recipe = TensorRecipe::Of(name);
    const auto found = conversions.find(name);
    if (found != conversions.end()) recipe.conversion = found->second;
    return recipe;
  };
}

absl::Status ExportMerged(const std::string& folder, torch::nn::Module& model,
                          const checkpoint::ExportOptions& options) {
  FSDP_RETURN_IF_ERROR(MergeLora(model));
  checkpoint::ExportOptions merged = options;
  merged.names = [](const std::string& name) -> std::optional<std::string> {
    if (IsFactor(name)) return std::nullopt;
    return name;
  };
  return checkpoint::ExportModel(folder, model, merged);
}

}  // namespace fsdp::adapters
