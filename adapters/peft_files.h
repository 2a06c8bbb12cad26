// Adapters in the files of Python's PEFT: a folder with adapter_config.json and
// adapter_model.safetensors, which holds what is trained and nothing of the
// base model.
#ifndef ADAPTERS_PEFT_FILES_H_
#define ADAPTERS_PEFT_FILES_H_

#include <torch/nn/module.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/lora.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"

namespace fsdp::adapters {

// Reads the configuration from a folder of PEFT or SaveAdapter(). Null `files`
// are this machine's. NotFound: there is no such file. InvalidArgument: as
// ParseLoraConfig(), or a rank that the weights in the folder do not have.
absl::StatusOr<LoraConfig> ReadLoraConfig(
    const std::string& folder, checkpoint::FileSystem* files = nullptr);

// Writes the factors, and what config.trained_whole names, of a model that
// AddLora() has prepared with `config` into a new folder. It is ExportModel(),
// with its errors, but sets `options.names`, `stem` and
// texts["adapter_config.json"]. Collective if the model is sharded.
absl::Status SaveAdapter(
    const std::string& folder, torch::nn::Module& model,
    const LoraConfig& config,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

// Fills the factors and what config.trained_whole names from a folder of PEFT
// or SaveAdapter(), or from step-N of a run that saved them alone
// (CheckpointerOptions::saves); `config` is that of the folder
// (ReadLoraConfig()). It is LoadModel(), with its errors, but sets
// `options.mapping`.
absl::Status LoadAdapter(const std::string& folder, torch::nn::Module& model,
                         const LoraConfig& config,
                         const checkpoint::LoadModelOptions& options =
                             checkpoint::LoadModelOptions());

// Returns a LoadModelOptions::mapping that fills `model`, sharded or not, from
// a base model's files, which have no factors. An int8 base is made of the
// files' floating-point weights, a few rows at a time; a row with a NaN or an
// infinity is InvalidArgument.
checkpoint::TensorMapping OfBaseModel(const torch::nn::Module& model);

// Calls MergeLora(), then ExportModel() without the factors, for readers that
// know no adapters. Errors are those of both. Collective if the model is
// sharded.
absl::Status ExportMerged(
    const std::string& folder, torch::nn::Module& model,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

}  // namespace fsdp::adapters

#endif  // ADAPTERS_PEFT_FILES_H_
