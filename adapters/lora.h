// Low-rank adapters (LoRA) on a model whose linear layers can have some
// (linear.h): what is trained is a thousandth of the parameters, and only that
// has gradients, optimizer states and reductions.
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

// Before FullyShard(): adds an adapter to each adapters::Linear that
// config.targets name, whose first factor is drawn from the default generator,
// and freezes all parameters but those and config.trained_whole's. Within a
// DeferredInit as outside. InvalidArgument, with nothing changed: what Check()
// refuses; a name that no module has, or one that is no adapters::Linear; to
// train whole what QuantizeBase() has made int8. FailedPrecondition: the model
// is sharded, or has adapters.
absl::Status AddLora(torch::nn::Module& module, const LoraConfig& config);

// Whether the parameter of that name is a factor of an adapter.
bool IsFactor(absl::string_view parameter);

// Adds what the adapters have learned to the weights, in the weights' dtype,
// and makes their second factors zero: the model computes the same, up to
// rounding, and its weights are those of a model without adapters. Not while an
// optimizer goes on. `module`: what FullyShard() has returned, whose units are
// merged one after the other with all factors in memory, or any that is not
// sharded. Collective where it is. Where the base is int8, adapted weights
// become numbers of the dtype that they had. FailedPrecondition: it has no
// adapters, is inside a sharded one, or is sharded with an int8 base, whose
// shards have no room for numbers.
absl::Status MergeLora(torch::nn::Module& module);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LORA_H_
