// A model from its files, whole and in this process.
#ifndef EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
#define EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_

#include <c10/core/ScalarType.h>

#include <string>

#include "absl/status/statusor.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

// Of FOLDER/config.json. NotFound: there is none; errors of ParseLlamaConfig().
absl::StatusOr<LlamaConfig> ReadConfig(const std::string& folder);

// In `dtype`, from what fsdp::checkpoint::LoadModel() reads: a folder of
// Hugging Face's, or step-N of a training run, of `config`. `adapter` is empty
// or a folder of PEFT's, whose adapters are merged into the model. Errors of
// LoadModel() and LoadAdapter().
absl::StatusOr<CausalLm> LoadWholeModel(const std::string& folder,
                                        const std::string& adapter,
                                        const LlamaConfig& config,
                                        c10::ScalarType dtype);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
