// Continues a sequence of tokens, which people may write and read.
#ifndef EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
#define EXAMPLES_LLAMA_GENERATION_GENERATOR_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {

// How the next token is chosen.
struct SamplingOptions {
  // Logits are divided by it: below 1, likely tokens become likelier. 0: the
  // likeliest token is always taken, whatever the rest says.
  double temperature = 0.8;
  int64_t top_k = 0;  // only so many of the likeliest tokens; 0: all
  // Among these, only the fewest likeliest tokens are allowed that together
  // reach this probability.
  double top_p = 1;
  uint64_t seed = 0;
};

// InvalidArgument names the flag with an impossible number.
absl::Status Check(const SamplingOptions& options);

// Returns float64 [vocab] for finite logits [vocab] on the CPU: 0 for tokens
// that are not allowed, with a sum of 1. The temperature is not 0. Of tokens
// that are as likely as the last allowed one, any may be allowed.
at::Tensor Probabilities(const at::Tensor& logits,
                         const SamplingOptions& options);

// Draws one token after another, the same for the same logits and seed.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);

  // Draws a token from logits [vocab]. FailedPrecondition: they are not finite,
  // as in a model whose training has diverged.
  absl::StatusOr<int64_t> Next(const at::Tensor& logits);

 private:
  const SamplingOptions options_;
  at::Generator generator_;
};

enum class Ending {
  kEos,           // the last token is one of the config's eos_token_ids
  kMaxTokens,     // there are as many as were asked for
  kMaxPositions,  // the model has no further positions
};

struct Generated {
  int64_t tokens = 0;
  Ending ending = Ending::kMaxTokens;
  absl::Duration prompt_time;  // until the first token
  absl::Duration time;         // of the other tokens
};

// Gets each token. An error ends the generation.
using OnToken = std::function<absl::Status(int64_t token)>;

// InvalidArgument: the prompt is empty, leaves no room in
// max_position_embeddings, or has tokens outside of the vocabulary.
absl::Status CheckPrompt(const std::vector<int64_t>& prompt,
                         const LlamaConfig& config);

// Generates at most `max_tokens` tokens behind `prompt`, and hands each to
// `on_token` as soon as it is drawn. `model`, of `config`, is not sharded.
// InvalidArgument: CheckPrompt() or Check(sampling) refuses. ResourceExhausted:
// there is no memory. Other errors are those of Sampler and of `on_token`.
absl::StatusOr<Generated> Generate(CausalLmImpl& model,
                                   const LlamaConfig& config,
                                   const std::vector<int64_t>& prompt,
                                   int64_t max_tokens,
                                   const SamplingOptions& sampling,
                                   const OnToken& on_token);

// Tokens as people write and read them.

// Parses "1, 2 3": integers with commas or white space between them.
// InvalidArgument: something else is there.
absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text);

// Returns each byte as a token.
std::vector<int64_t> BytesOf(absl::string_view text);

// Turns tokens that are bytes into text for a terminal: each character of UTF-8
// when it is whole, and '?' for bytes that a terminal could take as a command
// or that are no text.
class PrintableText {
 public:
  // Returns what can be shown after this token.
  std::string Add(int64_t token);
  // Returns what is left at the end.
  std::string Finish();

 private:
  std::string waiting_;  // the beginning of a character
};

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
