// Continues a sequence of tokens.
#ifndef EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
#define EXAMPLES_LLAMA_GENERATION_GENERATOR_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

// Which token comes next.

namespace llama {

struct SamplingOptions {
  // What logits are divided by: below 1, likely tokens become likelier. 0: the
  // likeliest token always, whatever the rest says.
  double temperature = 0.8;
  int64_t top_k = 0;  // only so many likeliest tokens; 0: all
  // Then only the fewest likeliest tokens that are as probable together.
  double top_p = 1;
  uint64_t seed = 0;
};

// InvalidArgument, naming the flag: a number that cannot be.
absl::Status Check(const SamplingOptions& options);

// Of logits [vocab], finite, on the CPU -> float64 [vocab], with 0 for tokens
// that are not allowed and a sum of 1. The temperature is not 0. Of tokens that
// are as likely as the last one allowed, any may be.
at::Tensor Probabilities(const at::Tensor& logits,
                         const SamplingOptions& options);

// Draws one token after the other, the same ones for the same logits and seed.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);

  // From logits [vocab]. FailedPrecondition: they are not finite, as those of a
  // model are whose training has diverged.
  absl::StatusOr<int64_t> Next(const at::Tensor& logits);

 private:
  const SamplingOptions options_;
  at::Generator generator_;
};

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
