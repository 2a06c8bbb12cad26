// Adapters in the files that Python's PEFT writes and reads: a folder with
// adapter_config.json and adapter_model.safetensors, which has what is trained
// and nothing of the base model.
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

// Of a folder that PEFT or SaveAdapter() has written. `files`: null: the
// machine's. NotFound: there is none; otherwise as ParseLoraConfig(), and
// InvalidArgument for a rank that the weights beside it do not have.
absl::StatusOr<LoraConfig> ReadLoraConfig(
    const std::string& folder, checkpoint::FileSystem* files = nullptr);

// A new folder: the factors, and what config.trained_whole names, of a model
// that AddLora() has made with `config`, sharded or not. As ExportModel(), with
// its errors, but for `options.names`, `stem` and texts["adapter_config.json"],
// which are replaced. Collective where the model is sharded.
absl::Status SaveAdapter(
    const std::string& folder, torch::nn::Module& model,
    const LoraConfig& config,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

// Fills these from such a folder, or from step-N of a run that saved them alone
// (CheckpointerOptions::saves), whose configuration is `config`
// (ReadLoraConfig()); the rest of the model stays. As LoadModel(), with its
// errors, but for `options.mapping`.
absl::Status LoadAdapter(const std::string& folder, torch::nn::Module& model,
                         const LoraConfig& config,
                         const checkpoint::LoadModelOptions& options =
                             checkpoint::LoadModelOptions());

// For LoadModelOptions::mapping: a base model's files, which have no factors,
// for `model`, sharded or not. Weights of an int8 base are made of the files'
// floating-point ones, a few rows at a time; a row with a NaN or an infinity is
// InvalidArgument.
checkpoint::TensorMapping OfBaseModel(const torch::nn::Module& model);

// MergeLora(), with its errors, then as ExportModel() without the factors: a
// model for those who know of no adapters. Collective where the model is
// sharded.
absl::Status ExportMerged(
    const std::string& folder, torch::nn::Module& model,
    const checkpoint::ExportOptions& options = checkpoint::ExportOptions());

}  // namespace fsdp::adapters

#endif  // ADAPTERS_PEFT_FILES_H_
