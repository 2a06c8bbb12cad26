// Reads Hugging Face's config.json of a Llama, Qwen2 or Qwen3.
#ifndef EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_
#define EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace llama {

// A scaling makes some wavelengths `factor` times as long.
struct RopeScaling {
  enum class Type {
    kLinear,   // all
    kDynamic,  // none: theta grows with a sequence longer than `tokens`
    kYarn,     // those of pairs that turn less than `low` times in `tokens`,
               // not of those that turn more than `high` times
               // (arXiv:2309.00071)
    kLlama3,   // those above `tokens` / `low`, and not those below `tokens` /
               // `high`
  };
  Type type;
  double factor;
  double low = 0;
  double high = 0;  // above `low`
  int64_t tokens = 0;
  double attention_factor = 1;  // multiplies cosines and sines
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<RopeScaling> scaling;  // unset: type "default"
};

// Made by ParseLlamaConfig(): sizes are from 1 to 2^31 - 1.
struct LlamaConfig {
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t intermediate_size;
  int64_t num_hidden_layers;
  int64_t num_attention_heads;  // a multiple of num_key_value_heads
  int64_t num_key_value_heads;
  int64_t head_dim;                 // even
  int64_t max_position_embeddings;  // longer sequences are computed, too
  double rms_norm_eps;
  RopeConfig rope;
  bool tie_word_embeddings;  // the head's weight is that of the embedding

  // These differ between the three architectures.
  bool qkv_bias;     // of q_proj, k_proj and v_proj
  bool output_bias;  // of o_proj
  bool mlp_bias;
  bool qk_norm;  // queries and keys are normalized, head by head

  double initializer_range;  // standard deviation of initial weights
  // Token ids are below vocab_size. The padding token's embedding gets no
  // gradient.
  std::optional<int64_t> pad_token_id;
  std::vector<int64_t> eos_token_ids;
};

// `text` is that of a config.json. Members for which transformers has defaults
// may be absent; members that do not affect what is computed are ignored.
// Unimplemented: it asks for other computations than ours, such as other
// architectures, sliding windows, dropout or quantized weights.
// InvalidArgument: it is no JSON object, or a member is missing or impossible.
absl::StatusOr<LlamaConfig> ParseLlamaConfig(absl::string_view text);

// Takes the eos_token_id of a generation_config.json, whose text this is, where
// it has one: transformers generates by that. InvalidArgument names what is
// wrong.
absl::Status TakeGenerationConfig(absl::string_view text, LlamaConfig& config);

// Reads the rotary position embedding of a whole config.json, an object:
// "rope_theta" and "rope_scaling", or "rope_parameters" as in transformers 5.
// `max_position_embeddings` replaces an absent
// original_max_position_embeddings. Unimplemented: another type, or an unknown
// parameter. InvalidArgument: an impossible value, or two that contradict each
// other.
absl::StatusOr<RopeConfig> ParseRopeConfig(const fsdp::Json& config,
                                           int64_t max_position_embeddings);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_MODEL_LLAMA_CONFIG_H_
