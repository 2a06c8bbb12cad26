// Adds low-rank adapters (LoRA) to a model whose linear layers are
// adapters::Linear (linear.h). About a thousandth of the parameters is trained,
// and only that has gradients, optimizer states and reductions.
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

// Adds an adapter to each adapters::Linear that config.targets name, and
// freezes all parameters except the factors and those of config.trained_whole.
// The first factors are drawn from the default generator. Call it before
// FullyShard(), within a DeferredInit or outside. It changes nothing when it
// fails. InvalidArgument: Check() refuses `config`; no module has a name that
// it lists; a target is no adapters::Linear; a module to train whole has a
// weight that QuantizeBase() has made int8. FailedPrecondition: the model is
// sharded or has adapters.
absl::Status AddLora(torch::nn::Module& module, const LoraConfig& config);

// Returns whether the parameter of that name is a factor of an adapter.
bool IsFactor(absl::string_view parameter);

// Adds what the adapters have learned to the weights, in the weights' dtype,
// and makes their second factors zero. The model computes the same, up to
// rounding, and its weights are those of a model without adapters. Do not go on
// with the optimizer afterwards. `module` is what FullyShard() has returned, or
// any module that is not sharded. Sharded units are merged one after the other,
// with all factors in memory; the call is then collective. Adapted weights of
// an int8 base get the dtype that they had as numbers. FailedPrecondition: the
// module has no adapters, is part of a sharded one, or is sharded with an int8
// base, whose shards have no room for numbers.
absl::Status MergeLora(torch::nn::Module& module);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LORA_H_
