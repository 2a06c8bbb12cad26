#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <regex>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "adapters/lora.h"
#include "base/files/file_system.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/load/source_folder.h"

namespace fsdp::adapters {

// --- The configuration -------------------------------------------------------
namespace {

absl::Status Wrong(absl::string_view key, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(key, " ", what));
}

// These do not change what an adapter computes that comes from files.
constexpr absl::string_view kIgnored[] = {
    "task_type",      "auto_mapping",  "peft_version",     "revision",
    "inference_mode", "megatron_core", "megatron_config",  "loftq_config",
    "runtime_config", "eva_config",    "qalora_group_size"};

// Returns whether `value` is one that PEFT writes for an unused feature.
bool IsUnused(const Json& value) {
  const auto* const flag = value.As<bool>();
  const auto* const array = value.As<Json::Array>();
  const auto* const object = value.As<Json::Object>();
  return value == Json() || (flag != nullptr && !*flag) ||
         (array != nullptr && array->empty()) ||
         (object != nullptr && object->empty());
}

absl::Status ReadNumber(absl::string_view key, const Json& value,
                        double& number) {
  number = value.NumberOr(0);
  return value.As<int64_t>() != nullptr || value.As<double>() != nullptr
             ? absl::OkStatus()
             : Wrong(key, "is not a number");
}

template <typename T>
absl::Status ReadValue(absl::string_view key, const Json& value,
                       absl::string_view expected, T& result) {
  const auto* const found = value.As<T>();
  if (found == nullptr) return Wrong(key, absl::StrCat("is not ", expected));
  result = *found;
  return absl::OkStatus();
}

// One may stand for a list of one.
template <typename T>
absl::Status ReadList(absl::string_view key, const Json& value,
                      absl::string_view expected, std::vector<T>& list) {
  if (value == Json()) return absl::OkStatus();
  const auto* const array = value.As<Json::Array>();
  for (const Json& one : array != nullptr ? *array : Json::Array{value}) {
    FSDP_RETURN_IF_ERROR(ReadValue(key, one, expected, list.emplace_back()));
  }
  return absl::OkStatus();
}

absl::Status ReadPattern(absl::string_view key, const Json& value,
                         std::vector<std::pair<std::string, double>>& pattern) {
  const auto* const members = value.As<Json::Object>();
  if (members == nullptr) {
    return IsUnused(value) ? absl::OkStatus() : Wrong(key, "is no object");
  }
  for (const auto& [name, number] : *members) {
    FSDP_RETURN_IF_ERROR(
        ReadNumber(key, number, pattern.emplace_back(name, 0).second));
  }
  return absl::OkStatus();
}

// As Python's re.fullmatch(), in polynomial time. Throws std::regex_error.
bool Matches(const std::string& pattern, absl::string_view name) {
  const std::regex compiled(
      pattern,
      std::regex::ECMAScript | std::regex_constants::__polynomial);  // NOLINT
  return std::regex_match(name.begin(), name.end(), compiled);
}

absl::Status CheckPattern(const std::string& pattern) {
  try {
    Matches(pattern, "");
    return absl::OkStatus();
  } catch (const std::regex_error& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapters of layers that \"", pattern,
                     "\" matches: ", error.what(), ": list the names"));
  }
}

// Null: none matches.
const double* NumberOf(
    const std::vector<std::pair<std::string, double>>& pattern,
    absl::string_view layer) {
  for (const auto& [end, number] : pattern) {
    if (Matches(absl::StrCat("(.*\\.)?(", end, ")"), layer)) return &number;
  }
  return nullptr;
}

absl::Status Read(const std::string& key, const Json& value,
                  LoraConfig& config) {
  if (key == "r") return ReadValue(key, value, "a whole number", config.rank);
  if (key == "lora_alpha") return ReadNumber(key, value, config.alpha);
  if (key == "lora_dropout") return ReadNumber(key, value, config.dropout);
  if (key == "use_rslora") {
    return ReadValue(key, value, "true or false", config.rank_stabilized);
  }
  if (key == "rank_pattern") return ReadPattern(key, value, config.ranks);
  if (key == "alpha_pattern") return ReadPattern(key, value, config.alphas);
  if (key == "layers_to_transform") {
    return ReadList(key, value, "a list of numbers", config.layers);
  }
  if (key == "target_modules" && value.As<std::string>() != nullptr &&
      *value.As<std::string>() != kAllLinear) {
    config.target_pattern = *value.As<std::string>();
    return absl::OkStatus();
  }
  if (key == "target_modules" || key == "modules_to_save") {
    return ReadList(key, value, "a list of names",
                    key[0] == 't' ? config.targets : config.trained_whole);
  }
  if (key == "base_model_name_or_path" || key == "task_type") {
    const auto* const text = value.As<std::string>();
    if (text == nullptr) return absl::OkStatus();
    (key == "task_type" ? config.task_type : config.base_model) = *text;
    return absl::OkStatus();
  }
  const bool is_fine =
      key == "peft_type" ? value == Json("LORA")
      : key == "bias"    ? value == Json("none")
      : key == "init_lora_weights"
          // Others change the base model's weights.
          ? value.As<bool>() != nullptr || value == Json("gaussian")
          : absl::c_linear_search(kIgnored, key) || IsUnused(value);
  if (is_fine) return absl::OkStatus();
  return Wrong(key, absl::StrCat("is ", value.ToString(),
                                 ", which is not there: the adapter would "
                                 "compute something else"));
}

bool IsAllLinear(const LoraConfig& config) {
  return config.targets == std::vector<std::string>{kAllLinear};
}

Json ListOf(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return Json(names);
}

}  // namespace

double LoraConfig::Scale() const {
  const auto size = static_cast<double>(rank);
  return alpha / (rank_stabilized ? std::sqrt(size) : size);
}

bool LoraConfig::IsTarget(absl::string_view name) const {
  if (!target_pattern.empty()) return Matches(target_pattern, name);
  if (!IsNamedBy(name, targets)) return false;
  // PEFT takes whole names in every layer.
  if (layers.empty() || absl::c_linear_search(targets, name)) return true;
  // The last number in the name is the layer's, as for PEFT.
  const std::vector<std::string> parts = absl::StrSplit(name, '.');
  for (size_t i = parts.size() - 1; i-- > 2;) {
    int64_t number = 0;
    if (absl::SimpleAtoi(parts[i], &number)) {
      return absl::c_linear_search(layers, number);
    }
  }
  return false;
}

LoraConfig LoraConfig::Of(absl::string_view layer) const {
  LoraConfig own = *this;
  const double* const own_rank = NumberOf(ranks, layer);
  if (own_rank != nullptr) own.rank = static_cast<int64_t>(*own_rank);
  const double* const own_alpha = NumberOf(alphas, layer);
  if (own_alpha != nullptr) own.alpha = *own_alpha;
  return own;
}

absl::Status Check(const LoraConfig& config) {
  if (config.rank < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapters of rank ", config.rank, ": take at least 1"));
  }
  if (!(config.dropout >= 0 && config.dropout < 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "adapters with dropout ", config.dropout, ": take one in [0, 1)"));
  }
  if (!std::isfinite(config.Scale())) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapters with alpha ", config.alpha, ": take a number"));
  }
  FSDP_RETURN_IF_ERROR(CheckPattern(config.target_pattern));
  for (const auto* const numbers : {&config.ranks, &config.alphas}) {
    for (const auto& [pattern, number] : *numbers) {
      FSDP_RETURN_IF_ERROR(CheckPattern(pattern));
      const bool is_rank =
          number >= 1 && number < 1e9 && number == std::floor(number);
      if (is_rank || numbers == &config.alphas) continue;
      return Wrong("rank_pattern", absl::StrCat("has the rank ", number));
    }
  }
  const bool has_pattern = !config.target_pattern.empty();
  if (!config.layers.empty() && (IsAllLinear(config) || has_pattern)) {
    return Wrong("layers_to_transform", "needs a list of target_modules");
  }
  if (!config.targets.empty() && has_pattern) {
    return Wrong("target_modules", "is either a list or an expression");
  }
  if (config.targets.empty() && config.target_pattern.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "adapters of no layers: name some, such as q_proj, or ", kAllLinear));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoraConfig> ParseLoraConfig(absl::string_view json) {
  FSDP_ASSIGN_OR_RETURN(const Json value, Json::Parse(json));
  const auto* const members = value.As<Json::Object>();
  if (members == nullptr || value.Find("peft_type") == nullptr) {
    return absl::InvalidArgumentError(
        "there is no peft_type: it is not a file of PEFT's");
  }
  LoraConfig config;
  for (const auto& [key, member] : *members) {
    FSDP_RETURN_IF_ERROR(Read(key, member, config));
  }
  FSDP_RETURN_IF_ERROR(Check(config));
  return config;
}

std::string ToJson(const LoraConfig& config) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? Json() : Json(text);
  };
  Json::Object object;
  object.emplace_back("peft_type", "LORA");
  object.emplace_back("task_type", text_or_null(config.task_type));
  object.emplace_back("base_model_name_or_path",
                      text_or_null(config.base_model));
  object.emplace_back("inference_mode", true);
  object.emplace_back("r", config.rank);
  object.emplace_back("lora_alpha", config.alpha);
  object.emplace_back("lora_dropout", config.dropout);
  object.emplace_back("use_rslora", config.rank_stabilized);
  object.emplace_back("bias", "none");
  object.emplace_back("fan_in_fan_out", false);
  object.emplace_back("init_lora_weights", true);
  object.emplace_back("target_modules", !config.target_pattern.empty()
                                            ? Json(config.target_pattern)
                                        : IsAllLinear(config)
                                            ? Json(kAllLinear)
                                            : ListOf(config.targets));
  object.emplace_back("layers_to_transform",
                      config.layers.empty() ? Json() : Json(config.layers));
  object.emplace_back("rank_pattern", Json(Json::Object(config.ranks.begin(),
                                                        config.ranks.end())));
  object.emplace_back("alpha_pattern", Json(Json::Object(config.alphas.begin(),
                                                         config.alphas.end())));
  object.emplace_back("modules_to_save", config.trained_whole.empty()
                                             ? Json()
                                             : ListOf(config.trained_whole));
  return Json(std::move(object)).ToString();
}

// --- Folders -----------------------------------------------------------------
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

// Before memory is taken for factors that the file does not have.
absl::Status CheckFitsFile(const LoraConfig& config, const std::string& folder,
                           FileSystem& files) {
  const checkpoint::SourceFolder source(files, folder, /*sums=*/std::nullopt);
  FSDP_ASSIGN_OR_RETURN(const auto catalog, source.ReadModel());
  // Patterns may be for all layers, so that none has the configuration's rank.
  int64_t wanted = config.ranks.empty() ? config.rank : 1;
  int64_t found = 0;
  for (const auto& tensor : catalog.tensors()) {
    absl::string_view layer = tensor.info.name;
    const std::vector<int64_t>& shape = tensor.info.shape;
    if (!absl::ConsumeSuffix(&layer, ".lora_A.weight") || shape.empty()) {
      continue;
    }
    absl::ConsumePrefix(&layer, kPrefix);
    wanted = std::max(wanted, config.Of(layer).rank);
    found = std::max(found, shape[0]);
  }
  if (wanted <= found) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("r is ", wanted, ", and the factors beside it have ", found,
                   ": it is another adapter's"));
}

}  // namespace

absl::StatusOr<LoraConfig> ReadLoraConfig(const std::string& folder,
                                          FileSystem* files) {
  const std::string path = JoinPath(folder, kConfigName);
  FSDP_ASSIGN_OR_RETURN(const std::string text,
                        ReadFile(OrReal(files), path, kMaxConfigBytes));
  absl::StatusOr<LoraConfig> config = ParseLoraConfig(text);
  FSDP_RETURN_IF_ERROR(Annotate(config.status(), path));
  FSDP_RETURN_IF_ERROR(
      Annotate(CheckFitsFile(*config, folder, OrReal(files)), path));
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
  std::string path = JoinPath(folder, absl::StrCat(kStem, ".safetensors"));
  const bool is_checkpoint =
      !Exists(OrReal(options.files), path).value_or(true);
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
