// Makes the model that is trained from a Hugging Face folder, divided into
// units, and writes such a folder.
#ifndef EXAMPLES_LLAMA_TRAINING_MODEL_H_
#define EXAMPLES_LLAMA_TRAINING_MODEL_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora.h"
#include "comm/communicator.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "planner/choose/choose_options.h"

namespace llama {

using Model = fsdp::FullyShardedDataParallel<CausalLmImpl>;

struct ModelOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  // The dtype of compute. Shards and reductions are float32.
  c10::ScalarType compute = c10::kFloat;
  // If true, backward recomputes each layer instead of keeping its values.
  bool recompute = false;
  // Where shards, gradients and optimizer states rest. With `automatic` it may
  // name a directory, whose files may then be used, and no tiers.
  fsdp::OffloadOptions offload = {};
  uint64_t seed = 0;  // of the initial values
  // If true, only adapters get initial values: LoadModel() brings the others.
  bool loaded_later = false;
  // If set, the base is frozen, in `compute`, and has adapters.
  std::optional<fsdp::adapters::LoraConfig> lora = std::nullopt;
  // With `lora`: the weights of the base's linear layers are int8.
  std::optional<fsdp::adapters::Int8Options> int8_base = std::nullopt;
  // If set, units, strategy, recomputation and tiers are chosen for rows of
  // `seq` tokens, and rank 0 prints what was considered; MakeModel() sets
  // `loss` and `base`.
  std::optional<fsdp::AutoOptions> automatic = std::nullopt;
  int64_t seq = 1;
};

// Does what Module::to() does, for any device: that function cannot move to one
// that is a plugin of LibTorch.
void MoveTo(c10::Device device, torch::nn::Module& module);

// Returns the dtype to compute in: `asked` or, if unset, bfloat16 where the
// device multiplies it fast and otherwise float32. If bfloat16 is asked for and
// slow, says so on `log`, which may be null.
c10::ScalarType DtypeOf(std::optional<c10::ScalarType> asked,
                        c10::DeviceType device, std::ostream* log);

// Adds adapters by fsdp::adapters::AddLora(). InvalidArgument: the untied head
// would have one, without which it computes.
absl::Status AddAdapters(const fsdp::adapters::LoraConfig& lora,
                         CausalLmImpl& model);

// Makes a model with the random values of InitializeParameters(), of which no
// rank has all, or with values to be loaded later. Its units are the decoder
// layers and, unless the head is tied to the embedding, these two; the root
// owns what they share. Collective. Errors are those of QuantizeBase(),
// AddAdapters(), FullyShard() and ChooseOptions().
absl::StatusOr<Model> MakeModel(
    const LlamaConfig& config, const ModelOptions& options,
    const std::shared_ptr<fsdp::comm::Communicator>& ranks);

// Returns whether the folder is a checkpoint of a run that trained adapters,
// which has only these and the name of their base.
bool HasAdaptersAlone(const std::string& folder);

// Reads FOLDER/config.json. Errors are those of ParseLlamaConfig(), which name
// the file, NotFound, and InvalidArgument if there are adapters alone, or if
// the files beside it are too small for the model, unless it is trained from
// scratch.
absl::StatusOr<LlamaConfig> ReadConfig(const std::string& folder,
                                       bool from_scratch = false);

// Loads a model of `config`, which may have adapters or an int8 base, from
// `folder`, whose files have neither, by fsdp::checkpoint::LoadModel(). The
// files may repeat a tied head.
absl::Status LoadBase(const std::string& folder, const LlamaConfig& config,
                      torch::nn::Module& model);

// Returns the files of a model's folder that are neither weights nor an index,
// by name: config.json, the tokenizer's, processors', licence. It leaves out
// folders, hidden files, files larger than 64 MiB, and files that would make
// the folder an adapter or a checkpoint. Errors name the file.
absl::StatusOr<std::map<std::string, std::string>> TextsBeside(
    const std::string& folder);

// Writes the model in `dtype` to a new folder, with the `texts` of the model it
// was made from. Adapters are merged into the model, which stays so.
// Collective.
absl::Status ExportTrained(const std::string& folder,
                           std::map<std::string, std::string> texts,
                           c10::ScalarType dtype, Model& model,
                           bool has_adapters);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_TRAINING_MODEL_H_
