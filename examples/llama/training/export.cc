#include "examples/llama/training/export.h"

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "adapters/peft_files.h"
#include "base/json.h"
#include "base/output_file.h"
#include "base/status_macros.h"
#include "checkpoint/model_files.h"
#include "examples/llama/training/model.h"

namespace llama {
namespace {

using ::fsdp::Json;

namespace fs = std::filesystem;

constexpr char kConfig[] = "config.json";
constexpr uintmax_t kMaxTextBytes = uintmax_t{64} << 20;

// Endings of files of weights and of their indices, ours and others'.
constexpr absl::string_view kEndingsOfWeights[] = {
    ".safetensors", ".index.json", ".bin",  ".pt", ".pth",    ".ckpt",
    ".distcp",      ".gguf",       ".onnx", ".h5", ".msgpack"};
constexpr absl::string_view kOfOtherFolders[] = {
    "adapter_config.json", "manifest.json", "training.json"};

bool IsText(absl::string_view name) {
  return name[0] != '.' && !absl::c_linear_search(kOfOtherFolders, name) &&
         absl::c_none_of(kEndingsOfWeights, [name](absl::string_view ending) {
           return absl::EndsWith(name, ending);
         });
}

// Returns `config` with `dtype` as that of the weights, under the name that the
// member has there.
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

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> TextsBeside(
    const std::string& folder) {
  std::map<std::string, std::string> texts;
  std::error_code error;
  for (auto entry = fs::directory_iterator(folder, error);
       !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename();
    std::error_code ignored;
    const uintmax_t size = entry->file_size(ignored);
    if (!IsText(name) || entry->is_directory(ignored) ||
        (entry->is_regular_file(ignored) && size > kMaxTextBytes)) {
      continue;
    }
    FSDP_ASSIGN_OR_RETURN(texts[name], fsdp::ReadRegularFile(entry->path()));
  }
  if (!error) return texts;
  return absl::ErrnoToStatus(error.value(), absl::StrCat("listing ", folder));
}

absl::Status ExportTrained(const std::string& folder,
                           std::map<std::string, std::string> texts,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters) {
  fsdp::checkpoint::ExportOptions options;
  options.dtype = dtype;
  FSDP_ASSIGN_OR_RETURN(texts[kConfig], WithDtype(texts[kConfig], dtype));
  options.texts = std::move(texts);
  return has_adapters ? fsdp::adapters::ExportMerged(folder, *model, options)
                      : fsdp::checkpoint::ExportModel(folder, *model, options);
}

}  // namespace llama
