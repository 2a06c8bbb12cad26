#include "adapters/peft_files.h"

#include <torch/nn/module.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "adapters/lora.h"
#include "adapters/lora_config.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_names.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/real_file_system.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"

namespace fsdp::adapters {
namespace {

constexpr char kConfigName[] = "adapter_config.json";
constexpr char kStem[] = "adapter_model";
// The model inside PEFT's own modules.
constexpr char kPrefix[] = "base_model.model.";
constexpr int64_t kMaxConfigBytes = int64_t{1} << 20;

bool IsOfModuleTrainedWhole(absl::string_view parameter,
                            const LoraConfig& config) {
  for (size_t dot = parameter.find('.'); dot != absl::string_view::npos;
       dot = parameter.find('.', dot + 1)) {
    if (IsNamedBy(parameter.substr(0, dot), config.trained_whole)) return true;
  }
  return false;
}

// Nothing: it is the base model's.
std::optional<std::string> NameInFile(const std::string& name,
                                      const LoraConfig& config) {
  if (!IsFactor(name) && !IsOfModuleTrainedWhole(name, config)) {
    return std::nullopt;
  }
  return absl::StrCat(kPrefix, name);
}

}  // namespace

absl::StatusOr<LoraConfig> ReadLoraConfig(const std::string& folder,
                                          checkpoint::FileSystem* files) {
  const std::string path = checkpoint::JoinPath(folder, kConfigName);
  FSDP_ASSIGN_OR_RETURN(
      const std::string text,
      checkpoint::ReadFile(checkpoint::OrReal(files), path, kMaxConfigBytes));
  absl::StatusOr<LoraConfig> config = ParseLoraConfig(text);
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      absl::StrCat(folder, ": ", config.status().message()));
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
  adapter.mapping =
      [&config](
          const std::string& name) -> std::optional<checkpoint::TensorRecipe> {
    const std::optional<std::string> in_file = NameInFile(name, config);
    if (!in_file.has_value()) return std::nullopt;
    return checkpoint::TensorRecipe::Of(*in_file);
  };
  return checkpoint::LoadModel(
      checkpoint::JoinPath(folder, absl::StrCat(kStem, ".safetensors")), model,
      adapter);
}

checkpoint::TensorMapping OfBaseModel() {
  return
      [](const std::string& name) -> std::optional<checkpoint::TensorRecipe> {
        if (IsFactor(name)) return std::nullopt;
        return checkpoint::TensorRecipe::Of(name);
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
