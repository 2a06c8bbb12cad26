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

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "adapters/lora_config.h"

namespace fsdp::adapters {

// Adds an adapter to each adapters::Linear that config.targets name, its first
// factor drawn from the default generator, and freezes all parameters except
// the factors and config.trained_whole's. Call it before FullyShard(), within a
// DeferredInit or outside. After an error nothing has changed. InvalidArgument:
// Check() refuses `config`; it names no module, or a target that is no
// adapters::Linear; a module to train whole has an int8 weight
// (QuantizeBase()). FailedPrecondition: the model is sharded or has adapters.
absl::Status AddLora(torch::nn::Module& module, const LoraConfig& config);

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
// numbers.
absl::Status MergeLora(torch::nn::Module& module);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LORA_H_
