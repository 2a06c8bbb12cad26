// Loads a whole model from its files into this process.
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
  // If true, weights of linear layers except the head are int8, with the
  // adapters beside them. Otherwise adapters are merged into the weights.
  bool int8_base = false;
};

// Loads a model of `config` from anything that fsdp::checkpoint::LoadModel()
// reads: a folder of Hugging Face's, or step-N of a training run. Errors are
// those of LoadModel() and LoadAdapter().
absl::StatusOr<CausalLm> LoadWholeModel(
    const std::string& folder, const LlamaConfig& config,
    const LoadedModelOptions& options = LoadedModelOptions());

// Tokens as people write and read them.

// Parses "1, 2 3": integers with commas or white space between them.
// InvalidArgument: something else is there.
absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text);

// Returns each byte as a token.
std::vector<int64_t> BytesOf(absl::string_view text);

// Turns tokens that are bytes into text for a terminal: each character of UTF-8
// when it is whole, and '?' for bytes that a terminal could take as a command
// or that are no text.
class PrintableText {
 public:
  // Returns what can be shown after this token.
  std::string Add(int64_t token);
  // Returns what is left at the end.
  std::string Finish();

 private:
  std::string waiting_;  // the beginning of a character
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
