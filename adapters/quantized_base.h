// A frozen base in int8, as in QLoRA (Dettmers et al. 2023, arXiv:2305.14314,
// which takes 4 bits). Weights of linear layers rest, and are gathered, as int8
// with a scale for each block. One weight at a time becomes numbers, while its
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

}  // namespace fsdp::adapters

#endif  // ADAPTERS_QUANTIZED_BASE_H_
