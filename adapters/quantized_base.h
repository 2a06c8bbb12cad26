// A frozen base in int8, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314,
// which takes 4 bits): the weights of linear layers rest, and are gathered, as
// int8 with a scale for each block, and are numbers one at a time, while a
// layer computes.
//
//   status = fsdp::adapters::QuantizeBase(*net);
//   status = fsdp::adapters::AddLora(*net, config);
//   auto model = fsdp::FullyShard(net, ranks, options);
//   load.mapping = fsdp::adapters::OfBaseModel(*model);  // peft_files.h
#ifndef ADAPTERS_QUANTIZED_BASE_H_
#define ADAPTERS_QUANTIZED_BASE_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp::adapters {

struct Int8Options {
  // Numbers of a row that share a scale, of 4 bytes, at most. No number is off
  // by more than 1/254 of its block's largest.
  int64_t block = 64;
  // Layers that stay as they are, by the rule of LoraConfig::targets. A model
  // that reads a layer's weight itself names that layer.
  std::vector<std::string> kept = {"lm_head"};
};

// Before AddLora() and FullyShard(): the weight of every adapters::Linear but
// those that are kept becomes int8, one after the other, and frozen. Within a
// DeferredInit as outside; weights that have no values yet get them as int8.
//
// InvalidArgument, with nothing changed: a block that is not positive; a name
// that no module has; no layer is left; a weight that a module elsewhere has,
// too; one with a NaN or an infinity. FailedPrecondition: the model is sharded,
// has adapters or is int8 already.
absl::Status QuantizeBase(torch::nn::Module& module,
                          const Int8Options& options = Int8Options());

}  // namespace fsdp::adapters

#endif  // ADAPTERS_QUANTIZED_BASE_H_
