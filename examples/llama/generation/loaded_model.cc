#include "examples/llama/generation/loaded_model.h"

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "adapters/lora.h"
#include "adapters/lora_config.h"
#include "adapters/peft_files.h"
#include "adapters/quantized_base.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "base/utf8.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/training/model.h"
#include "fsdp/deferred/deferred_init.h"

namespace llama {
namespace {

using ::fsdp::adapters::LoraConfig;

// Fills `model`, which has no values yet.
absl::Status Load(const std::string& folder, const LlamaConfig& of_model,
                  const LoadedModelOptions& options, CausalLmImpl& model) {
  std::optional<LoraConfig> config;
  if (!options.adapter.empty()) {
    FSDP_ASSIGN_OR_RETURN(config,
                          fsdp::adapters::ReadLoraConfig(options.adapter));
    FSDP_RETURN_IF_ERROR(fsdp::adapters::AddLora(model, *config));
  }
  FSDP_RETURN_IF_ERROR(LoadBase(folder, of_model, model));
  if (!config.has_value()) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(
      fsdp::adapters::LoadAdapter(options.adapter, model, *config));
  return options.int8_base ? absl::OkStatus()
                           : fsdp::adapters::MergeLora(model);
}

}  // namespace

absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const LlamaConfig& config,
                                        const LoadedModelOptions& options) {
  CausalLm model = nullptr;
  absl::Status made;
  FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("making the model", [&] {
    const fsdp::DeferredInit deferred;  // spends no time on random values
    model = CausalLm(config);
    model->to(options.dtype);
    if (options.int8_base) made = fsdp::adapters::QuantizeBase(*model);
    MoveTo(options.device, *model);
  }));
  FSDP_RETURN_IF_ERROR(made);
  FSDP_RETURN_IF_ERROR(Load(folder, config, options, *model));
  model->eval();
  return model;
}

namespace {

// Returns the length of the UTF-8 sequence that `first` begins, or else 1.
size_t LengthBy(unsigned char first) {
  if (first < 0xC2 || first > 0xF4) return 1;
  return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

bool MayBecomeCharacter(absl::string_view text) {
  return text.size() < LengthBy(static_cast<unsigned char>(text[0])) &&
         absl::c_all_of(text.substr(1), [](unsigned char byte) {
           return (byte & 0xC0) == 0x80;
         });
}

// `character` is one character of UTF-8.
std::string Shown(absl::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  const bool is_shown =
      character.size() == 1
          ? absl::ascii_isprint(first) || first == '\n' || first == '\t'
          // U+0080 to U+009F are control characters, too.
          : first != 0xC2 || static_cast<unsigned char>(character[1]) >= 0xA0;
  return is_shown ? std::string(character) : "?";
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text) {
  std::vector<int64_t> tokens;
  for (const absl::string_view part :
       absl::StrSplit(text, absl::ByAnyChar(", \t\r\n"), absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(part, &tokens.emplace_back())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\" is no token: tokens are numbers, such as 1,2,3"));
    }
  }
  return tokens;
}

std::vector<int64_t> BytesOf(absl::string_view text) {
  std::vector<int64_t> bytes;
  bytes.reserve(text.size());
  for (const char byte : text) bytes.push_back(static_cast<uint8_t>(byte));
  return bytes;
}

std::string PrintableText::Add(int64_t token) {
  if (token > 255) return absl::StrCat(Finish(), "?");
  waiting_.push_back(static_cast<char>(token));
  std::string shown;
  while (!waiting_.empty()) {
    const size_t length = fsdp::Utf8Length(waiting_);
    if (length == 0 && MayBecomeCharacter(waiting_)) break;
    const size_t done = length == 0 ? 1 : length;
    shown += length == 0 ? "?" : Shown(waiting_.substr(0, length));
    waiting_.erase(0, done);
  }
  return shown;
}

std::string PrintableText::Finish() {
  const std::string shown = waiting_.empty() ? "" : "?";
  waiting_.clear();
  return shown;
}

}  // namespace llama
