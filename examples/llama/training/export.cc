#include "examples/llama/training/export.h"

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "adapters/peft_files.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/model_files.h"
#include "examples/llama/training/model.h"

namespace llama {
namespace {

using ::fsdp::Json;

// Of a folder of Hugging Face's, those that are not about weights.
constexpr const char* kBesides[] = {"tokenizer.json",
                                    "tokenizer_config.json",
                                    "vocab.json",
                                    "special_tokens_map.json",
                                    "merges.txt",
                                    "added_tokens.json",
                                    "generation_config.json",
                                    "chat_template.jinja"};

}  // namespace

std::map<std::string, std::string> TextsBeside(const std::string& base) {
  std::map<std::string, std::string> texts;
  for (const char* const name : kBesides) {
    std::ifstream file(absl::StrCat(base, "/", name), std::ios::binary);
    if (!file) continue;
    texts[name] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return texts;
}

absl::StatusOr<std::string> WithDtype(const std::string& config,
                                      c10::ScalarType dtype) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(config));
  const auto* const members = json.As<Json::Object>();
  if (members == nullptr) {
    return absl::InvalidArgumentError("config.json is no JSON object");
  }
  const Json name(dtype == c10::kBFloat16 ? "bfloat16" : "float32");
  Json::Object changed = *members;
  bool found = false;
  for (auto& [key, value] : changed) {
    if (key != "torch_dtype" && key != "dtype") continue;
    value = name;
    found = true;
  }
  if (!found) changed.emplace_back("torch_dtype", name);
  return Json(std::move(changed)).ToString();
}

absl::Status ExportTrained(const std::string& folder, const std::string& base,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters) {
  FSDP_ASSIGN_OR_RETURN(const std::string config, ReadConfigText(base));
  fsdp::checkpoint::ExportOptions options;
  options.dtype = dtype;
  options.texts = TextsBeside(base);
  FSDP_ASSIGN_OR_RETURN(options.texts["config.json"], WithDtype(config, dtype));
  return has_adapters ? fsdp::adapters::ExportMerged(folder, *model, options)
                      : fsdp::checkpoint::ExportModel(folder, *model, options);
}

}  // namespace llama
