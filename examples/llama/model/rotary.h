// Rotary position embeddings: pairs of a head's elements turn by angles that
// grow with the position.
#ifndef EXAMPLES_LLAMA_MODEL_ROTARY_H_
#define EXAMPLES_LLAMA_MODEL_ROTARY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "examples/llama/model/rope_config.h"

namespace llama {

// Radians per token of each pair: float32 [head_dim
// / 2] on `device`, by the same roundings as transformers. Neither a parameter
// nor a buffer: it is computed where it is needed, so that casting a module,
// deferring it or loading one does not touch it.
at::Tensor InverseFrequencies(const RopeConfig& rope, int64_t head_dim,
                              c10::Device device);

// Both [tokens, head_dim].
struct RotaryTables {
  at::Tensor cos;
  at::Tensor sin;
};

// For the units of a sharded model, which take these as an argument.
template <typename Visit>
void VisitTensors(RotaryTables& tables, Visit visit) {
  visit(tables.cos);
  visit(tables.sin);
}

// Of `positions`, int64 [tokens], on their device; rounded to `dtype` last.
RotaryTables MakeRotaryTables(const RopeConfig& rope, int64_t head_dim,
                              const at::Tensor& positions,
                              c10::ScalarType dtype);

// `x` [batch, heads, tokens, head_dim], turned: element i is paired with
// element i + head_dim / 2.
at::Tensor Rotate(const at::Tensor& x, const RotaryTables& tables);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_ROTARY_H_
