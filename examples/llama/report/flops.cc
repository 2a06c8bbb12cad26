#include "examples/llama/report/flops.h"

#include <cstdint>

#include "examples/llama/model/llama_config.h"

namespace llama {

int64_t MatmulWeights(const LlamaConfig& config) {
  const int64_t queries = config.num_attention_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  const int64_t attention = config.hidden_size * (2 * queries + 2 * keys);
  const int64_t mlp = 3 * config.hidden_size * config.intermediate_size;
  return config.num_hidden_layers * (attention + mlp) +
         config.hidden_size * config.vocab_size;
}

double FlopsPerToken(const LlamaConfig& config, int64_t seq, bool frozen_base) {
  const double weights = static_cast<double>(MatmulWeights(config));
  const double attention =
      12.0 *
      static_cast<double>(config.num_hidden_layers *
                          config.num_attention_heads * config.head_dim * seq);
  return (frozen_base ? 4 : 6) * weights + attention;
}

}  // namespace llama
