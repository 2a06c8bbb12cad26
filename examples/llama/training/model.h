// The model that is trained: sharded, each decoder layer a unit.
#ifndef EXAMPLES_LLAMA_TRAINING_MODEL_H_
#define EXAMPLES_LLAMA_TRAINING_MODEL_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/statusor.h"
#include "adapters/lora_config.h"
#include "adapters/quantized_base.h"
#include "comm/communicator.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/options/options.h"

namespace llama {

using Model = fsdp::FullyShardedDataParallel<CausalLmImpl>;

// What fsdp::ChooseOptions() may use, and what a rank trains on.
struct AutoSharding {
  int64_t memory_bytes = 0;
  int64_t rows = 1;  // of a backward
  int64_t seq = 1;
  int64_t backwards = 1;  // whose gradients are whole before they are reduced
  std::ostream* out = nullptr;  // for what was considered, on rank 0
};

struct ModelOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  fsdp::ShardingStrategy strategy = fsdp::ShardingStrategy::kFullShard;
  // What it computes in; shards are float32, and reductions are.
  c10::ScalarType compute = c10::kFloat;
  // Backward runs each layer again instead of keeping what it has computed.
  bool recompute = false;
  uint64_t seed = 0;  // of its initial values
  // Only adapters get any: LoadModel() brings the others.
  bool loaded_later = false;
  // The base frozen, in `compute`, and adapters on it.
  std::optional<fsdp::adapters::LoraConfig> lora = std::nullopt;
  // With `lora`: the weights of its linear layers in int8.
  std::optional<fsdp::adapters::Int8Options> int8_base = std::nullopt;
  // Strategy and recomputation are chosen.
  std::optional<AutoSharding> automatic = std::nullopt;
};

// Module::to() for any device, also one that is a plugin of LibTorch, to which
// that function knows no way.
void MoveTo(c10::Device device, torch::nn::Module& module);

// With the random values of InitializeParameters(), which no rank has as a
// whole, or those that are loaded later. Collective; errors are those of
// QuantizeBase(), AddLora(), FullyShard() and ChooseOptions().
absl::StatusOr<Model> MakeModel(
    const LlamaConfig& config, const ModelOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks);

// Of FOLDER/config.json. Errors of ParseLlamaConfig(), which name the file;
// InvalidArgument for a model that the files beside it cannot fill, unless it
// is to be trained from scratch.
absl::StatusOr<LlamaConfig> ReadConfig(const std::string& folder,
                                       bool from_scratch = false);

// fsdp::checkpoint::LoadModel() of a model of `config`, which may have adapters
// or an int8 base, from `folder`, whose files have neither. A tied head may be
// there once more.
absl::Status LoadBase(const std::string& folder, const LlamaConfig& config,
                      torch::nn::Module& model);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_MODEL_H_
