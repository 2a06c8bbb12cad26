// How much a step computes.
#ifndef EXAMPLES_LLAMA_REPORT_FLOPS_H_
#define EXAMPLES_LLAMA_REPORT_FLOPS_H_

#include <cstdint>

#include "examples/llama/model/llama_config.h"

namespace llama {

// Weights that each token is multiplied by: those of the layers and the head.
int64_t MatmulWeights(const LlamaConfig& config);

// Floating-point operations of forward and backward for one token of a row of
// `seq`, as Chowdhery et al. 2022 (PaLM, appendix B) count them: 6 per weight
// and 12 per layer, head, channel and token that attention looks at, without
// what recomputation repeats and what a causal mask spares. With a frozen base
// 4 per weight, as its gradients are not computed.
double FlopsPerToken(const LlamaConfig& config, int64_t seq, bool frozen_base);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_REPORT_FLOPS_H_
