// Adds low-rank adapters (LoRA) to a model whose linear layers are
// adapters::Linear. About a thousandth of the parameters is trained, and only
// that has gradients, optimizer states and reductions.
//
//   fsdp::adapters::LoraConfig config;
//   config.targets = {"q_proj", "v_proj"};
//   status = fsdp::adapters::AddLora(*net, config);       // freezes the rest
//   auto model = fsdp::FullyShard(net, ranks, options);
//   ... train model->Parameters() that require grad ...
//   status = fsdp::adapters::SaveAdapter("/runs/mine", *model, config);
#ifndef ADAPTERS_LORA_H_
#define ADAPTERS_LORA_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/load/tensor_recipe.h"
#include "checkpoint/model_files.h"

namespace fsdp::adapters {

// The low-rank adapters that a model gets, in the form that Python's PEFT
// writes to adapter_config.json.
struct LoraConfig {
  int64_t rank = 8;    // the size between the two factors; at least 1
  double alpha = 8;    // what Scale() divides by the rank
  double dropout = 0;  // of the adapters' inputs, in training; in [0, 1)
  // Scales by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023,
  // arXiv:2312.03732).
  bool rank_stabilized = false;
  // Names of layers, or the ends of names: "q_proj" matches
  // "model.layers.0.self_attn.q_proj". kAllLinear alone means all but
  // "lm_head".
  std::vector<std::string> targets = {};
  // A regular expression of layers' complete names, instead of `targets`.
  std::string target_pattern = {};
  // Restricts `targets` to layers of these numbers, except complete names;
  // empty: no restriction.
  std::vector<int64_t> layers = {};
  // Other ranks and alphas for some layers. The first expression that matches a
  // layer's name, or the end of it, decides.
  std::vector<std::pair<std::string, double>> ranks = {};
  std::vector<std::pair<std::string, double>> alphas = {};
  // Modules that are trained whole; names as in `targets`.
  std::vector<std::string> trained_whole = {};
  // For readers of the file: where the base model comes from, and what PEFT
  // takes it for ("CAUSAL_LM" if transformers generates with it).
  std::string base_model = {};
  std::string task_type = {};

  // The factor of what an adapter adds: alpha / rank, or as `rank_stabilized`.
  double Scale() const;
  // Returns whether `name` is a target's; not for kAllLinear.
  bool IsTarget(absl::string_view name) const;
  // Returns this configuration with that layer's rank and alpha.
  LoraConfig Of(absl::string_view layer) const;
};

// The target that stands for all adapters::Linear but "lm_head".
inline constexpr char kAllLinear[] = "all-linear";

// InvalidArgument: the rank is below 1, dropout is not in [0, 1), the scale is
// not finite, there are no targets, or an expression is invalid.
absl::Status Check(const LoraConfig& config);

// Parses PEFT's JSON. InvalidArgument: it is not such JSON, a number is
// impossible, or a feature that it names is missing here and would change the
// result (DoRA, trained biases and so on).
absl::StatusOr<LoraConfig> ParseLoraConfig(absl::string_view json);
// Returns the JSON that ParseLoraConfig() and PEFT read.
std::string ToJson(const LoraConfig& config);

// Adds an adapter to each adapters::Linear that config.targets name, its first
// factor drawn from the default generator, and freezes all parameters except
// the factors and config.trained_whole's. Call it before FullyShard(), within a
// DeferredInit or outside. After an error nothing has changed. InvalidArgument:
// Check() refuses `config`; it names no module, or a target that is no
// adapters::Linear; a module to train whole has an int8 weight
// (QuantizeBase()). FailedPrecondition: the model is sharded or has adapters.
absl::Status AddLora(torch::nn::Module& module, const LoraConfig& config);

// Returns whether one of `names` is the module's name or the end of it.
bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names);

// Returns whether the parameter of that name is a factor of an adapter.
bool IsFactor(absl::string_view parameter);

// Adds what the adapters have learned to the weights, in the weights' dtype,
// and makes their second factors zero: the model computes the same, up to
// rounding, and its weights are those of a model without adapters. The
// optimizer must not go on afterwards. `module` is FullyShard()'s result,
// merged unit by unit with all factors in memory (collective), or any module
// that is not sharded. Adapted weights of an int8 base get the dtype that they
// had as numbers. FailedPrecondition: the module has no adapters, is part of a
// sharded one, or is sharded with an int8 base, whose shards have no room for
// numbers; an adapted weight is also another parameter, which would change; one
// or its factors are ignored by the sharding.
absl::Status MergeLora(torch::nn::Module& module);

// A frozen base in int8, as QLoRA has it in 4 bits (Dettmers and others, 2023,
// arXiv:2305.14314). Weights of linear layers rest, and are gathered, as int8
// with a scale for each block. One weight at a time becomes numbers, while its
// layer computes.
//
//   status = fsdp::adapters::QuantizeBase(*net);
//   status = fsdp::adapters::AddLora(*net, config);
//   auto model = fsdp::FullyShard(net, ranks, options);
//   load.mapping = fsdp::adapters::OfBaseModel(*model);
struct Int8Options {
  // The most numbers of a row that share a scale of 4 bytes. No number is off
  // by more than 1/254 of the largest in its block.
  int64_t block = 64;
  // Layers that are not quantized; names as in LoraConfig::targets. Name a
  // layer here if the model reads its weight directly.
  std::vector<std::string> kept = {"lm_head"};
};

// Makes the weight of every adapters::Linear int8 and frozen, one after the
// other, except those that are kept. Call it before AddLora() and FullyShard(),
// within a DeferredInit or outside; weights that have no values yet get them as
// int8.
//
// After an error nothing has changed. InvalidArgument: `block` is out of range;
// no module has a name in `kept`; no layer is left; another module has the
// weight too; a weight has a NaN or an infinity. FailedPrecondition: the model
// is sharded, has adapters or is int8 already.
absl::Status QuantizeBase(torch::nn::Module& module,
                          const Int8Options& options = Int8Options());

// Adapters in the files of Python's PEFT: a folder with adapter_config.json and
// adapter_model.safetensors, which holds what is trained and nothing of the
// base model.

// Reads the configuration from a folder of PEFT or SaveAdapter(). Null `files`
// are this machine's. NotFound: there is no such file. InvalidArgument: as
// ParseLoraConfig(), or a rank that the weights in the folder do not have.
absl::StatusOr<LoraConfig> ReadLoraConfig(const std::string& folder,
                                          FileSystem* files = nullptr);

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

#endif  // ADAPTERS_LORA_H_
