// A model from its files, whole and in this process.
#ifndef EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
#define EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

struct LoadedModelOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  c10::ScalarType dtype = c10::kFloat;
  std::string adapter;  // a folder of PEFT's; empty: none
  // The weights of linear layers but the head are int8, with the adapters
  // beside them. Otherwise adapters are merged into the weights.
  bool int8_base = false;
};

// From what fsdp::checkpoint::LoadModel() reads: a folder of Hugging Face's, or
// step-N of a training run, of `config`. Errors of LoadModel() and
// LoadAdapter().
absl::StatusOr<CausalLm> LoadWholeModel(
    const std::string& folder, const LlamaConfig& config,
    const LoadedModelOptions& options = LoadedModelOptions());

// Tokens as people write and read them.

// Of "1, 2 3": integers with commas or white space between. InvalidArgument:
// something else.
absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text);

// Tokens that are bytes.
std::vector<int64_t> BytesOf(absl::string_view text);

// The other way, byte by byte, for a terminal: characters of UTF-8 as soon as
// they are whole, and '?' for what could be taken for a command or is no text.
class PrintableText {
 public:
  // What can be shown now.
  std::string Add(int64_t token);
  // At the end.
  std::string Finish();

 private:
  std::string waiting_;  // the beginning of a character
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
