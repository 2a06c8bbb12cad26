// Continues a sequence of tokens.
#ifndef EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
#define EXAMPLES_LLAMA_GENERATION_GENERATOR_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "examples/llama/generation/sampler.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

enum class Ending {
  kEos,           // one of the config's eos_token_ids, the last token
  kMaxTokens,     // as many as were asked for
  kMaxPositions,  // the model knows of no further ones
};

struct Generated {
  int64_t tokens = 0;
  Ending ending = Ending::kMaxTokens;
  absl::Duration prompt_time;  // until the first token
  absl::Duration time;         // of the others
};

// An error ends the generation.
using OnToken = std::function<absl::Status(int64_t token)>;

// InvalidArgument: an empty prompt, one that leaves no room in
// max_position_embeddings, tokens outside of the vocabulary.
absl::Status CheckPrompt(const std::vector<int64_t>& prompt,
                         const LlamaConfig& config);

// At most `max_tokens` tokens behind `prompt`, each handed to `on_token` as
// soon as it is drawn. `model`, of `config`, is not sharded.
// InvalidArgument: what CheckPrompt() and Check(sampling) refuse.
// ResourceExhausted: no memory. Errors of Sampler and of `on_token`.
absl::StatusOr<Generated> Generate(CausalLmImpl& model,
                                   const LlamaConfig& config,
                                   const std::vector<int64_t>& prompt,
                                   int64_t max_tokens,
                                   const SamplingOptions& sampling,
                                   const OnToken& on_token);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
