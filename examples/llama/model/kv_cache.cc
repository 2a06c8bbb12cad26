#include "examples/llama/model/kv_cache.h"

#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

#include <cstdint>

#include "examples/llama/model/llama_config.h"

namespace llama {

KvCache MakeKvCache(const LlamaConfig& config, int64_t batch,
                    int64_t max_tokens, const at::TensorOptions& options) {
  const auto make = [&] {
    return at::empty(
        {batch, config.num_key_value_heads, max_tokens, config.head_dim},
        options);
  };
  KvCache cache;
  cache.batch = batch;
  cache.max_tokens = max_tokens;
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    cache.layers.push_back({make(), make()});
  }
  return cache;
}

}  // namespace llama
