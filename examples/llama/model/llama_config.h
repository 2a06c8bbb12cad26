// What a config.json of Hugging Face's says of a Llama, Qwen2 or Qwen3.
#ifndef EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_
#define EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/llama/model/rope_config.h"

namespace llama {

// As ParseLlamaConfig() makes it: sizes from 1 to 2^31 - 1.
struct LlamaConfig {
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_hidden_layers;
  int64_t num_attention_heads;  // a multiple of num_key_value_heads
  int64_t num_key_value_heads;
  int64_t head_dim;  // even
  int64_t
      max_position_embeddings;  // longer sequences are computed all the same
  double rms_norm_eps;
  RopeConfig rope;
  bool tie_word_embeddings;  // the head's weight is that of the embedding

  // Where the three architectures differ.
  bool qkv_bias;     // of q_proj, k_proj and v_proj
  bool output_bias;  // of o_proj
  bool mlp_bias;
  bool qk_norm;  // queries and keys are normalized, head by head

  std::optional<c10::ScalarType> dtype;  // of the files' weights
  double initializer_range;  // standard deviation of initial weights
  // Below vocab_size. The embedding of the padding token gets no gradient.
  std::optional<int64_t> pad_token_id;
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;
};

// `text` is that of a config.json. What transformers has defaults for may be
// absent. Members that change nothing of what is computed are not looked at.
// Unimplemented: what is asked for is computed otherwise than here, such as
// other architectures, sliding windows, dropout, quantized weights.
// InvalidArgument: no JSON object, something is missing, or cannot be.
absl::StatusOr<LlamaConfig> ParseLlamaConfig(absl::string_view text);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_
