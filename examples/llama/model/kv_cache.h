// What a model keeps of tokens that it has seen, so that each new one costs no
// more than itself.
#ifndef EXAMPLES_LLAMA_MODEL_KV_CACHE_H_
#define EXAMPLES_LLAMA_MODEL_KV_CACHE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>
#include <vector>

#include "examples/llama/model/llama_config.h"

namespace llama {

// Both [batch, num_key_value_heads, max_tokens, head_dim]; what is behind
// KvCache::tokens is undefined.
struct LayerCache {
  at::Tensor keys;
  at::Tensor values;
};

// Of a batch of sequences that are equally long. To begin anew, set `tokens` to
// 0; to go back, to fewer.
struct KvCache {
  int64_t tokens = 0;  // of each sequence that it has
  int64_t batch = 0;
  int64_t max_tokens = 0;
  std::vector<LayerCache> layers;
};

// An empty one. `options` are those of the model's parameters: dtype, device.
KvCache MakeKvCache(const LlamaConfig& config, int64_t batch,
                    int64_t max_tokens, const at::TensorOptions& options);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_KV_CACHE_H_
