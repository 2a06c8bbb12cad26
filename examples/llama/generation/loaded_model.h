// A model from its files, whole and in this process.
#ifndef EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
#define EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "absl/status/statusor.h"
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

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_LOADED_MODEL_H_
