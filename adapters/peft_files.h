// Adapters in the files that Python's PEFT writes and reads: a folder with
// adapter_config.json and adapter_model.safetensors, which holds what is
// trained and nothing of the base model.
#ifndef ADAPTERS_PEFT_FILES_H_
#define ADAPTERS_PEFT_FILES_H_

#include <torch/nn/module.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora_config.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"

namespace fsdp::adapters {

// Reads the configuration from a folder that PEFT or SaveAdapter() has written.
// With null `files` it is a folder of this machine. NotFound: there is no such
// file. InvalidArgument: as ParseLoraConfig(), and also for a rank that the
// weights in the folder do not have.
absl::StatusOr<LoraConfig> ReadLoraConfig(
    const std::string& folder, checkpoint::FileSystem* files = nullptr);

// Writes a new folder with the factors, and what config.trained_whole names, of
// a model that AddLora() has prepared with `config`. The model may be sharded;
// the call is then collective. It is ExportModel(), with its errors, except
// that it replaces `options.names`, `stem` and texts["adapter_config.json"].
absl::Status SaveAdapter(
    const std::string& folder, torch::nn::Module& model,
    const LoraConfig& config,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

// Fills the factors and what config.trained_whole names, and leaves the rest of
// the model. `folder` is one that SaveAdapter() or PEFT has written, or step-N
// of a run that saved them alone (CheckpointerOptions::saves); `config` is its
// configuration (ReadLoraConfig()). It is LoadModel(), with its errors, except
// that it replaces `options.mapping`.
absl::Status LoadAdapter(const std::string& folder, torch::nn::Module& model,
                         const LoraConfig& config,
                         const checkpoint::LoadModelOptions& options =
                             checkpoint::LoadModelOptions());

// Returns a LoadModelOptions::mapping that fills `model`, sharded or not, from
// a base model's files, which have no factors. Weights of an int8 base are made
// of the files' floating-point weights, a few rows at a time. InvalidArgument
// from the load: a row has a NaN or an infinity.
checkpoint::TensorMapping OfBaseModel(const torch::nn::Module& model);

// Exports a model for readers that know no adapters: MergeLora(), then
// ExportModel() without the factors, with the errors of both. Collective if the
// model is sharded.
absl::Status ExportMerged(
    const std::string& folder, torch::nn::Module& model,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

}  // namespace fsdp::adapters

#endif  // ADAPTERS_PEFT_FILES_H_
