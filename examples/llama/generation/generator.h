// Continues sequences of tokens, which people may write and read.
#ifndef EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
#define EXAMPLES_LLAMA_GENERATION_GENERATOR_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/device_graph.h"
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
  uint64_t seed = 0;  // of the device's default generator
};

// InvalidArgument names the flag with an impossible number.
absl::Status Check(const SamplingOptions& options);

// Returns float64 [..., vocab] for finite logits [..., vocab]: 0 for tokens
// that are not allowed, with a sum of 1. The temperature is not 0. If several
// tokens are as likely as the last allowed one, any of them may be allowed.
at::Tensor Probabilities(const at::Tensor& logits,
                         const SamplingOptions& options);

// Stands for the token of logits that are not finite.
inline constexpr int64_t kNotFinite = -1;

// Draws a token from each row of logits [batch, vocab]: int64 [batch], by the
// default generator of their device, the only one that graphs know. The host
// sees no values, so that a DeviceGraph can capture it.
at::Tensor Draw(const at::Tensor& logits, const SamplingOptions& options);

enum class Ending {
  kEos,           // the last token is one of the config's eos_token_ids
  kMaxTokens,     // there are as many as were asked for
  kMaxPositions,  // the model has no further positions
};

struct Generated {
  int64_t tokens = 0;           // behind all prompts
  std::vector<Ending> endings;  // one for each prompt
  absl::Duration prompt_time;   // until each has a token
  absl::Duration time;          // of the other tokens
};

// Gets each token, and the index of its prompt. An error ends the generation.
using OnToken = std::function<absl::Status(size_t prompt, int64_t token)>;

using Prompts = std::vector<std::vector<int64_t>>;

// InvalidArgument: a prompt is empty, leaves no room in
// max_position_embeddings, or has tokens outside of the vocabulary.
absl::Status CheckPrompts(const Prompts& prompts, const LlamaConfig& config);

// Generates at most `max_tokens` tokens, which is at least 1, behind each of
// `prompts`, at least one, all together; but for rounding, the likeliest tokens
// are those of each prompt alone, except that a dynamic rope scaling goes by
// the longest prompt. Hands tokens to `on_token` as soon as
// they are drawn; on the CPU before the next ones are computed, on other
// devices meanwhile. There a graph of `make_graph`, which may be null, replays
// the steps. `model`, of `config`, is not sharded; CheckPrompts() and
// Check(sampling) are OK. FailedPrecondition: logits are not finite, as in a
// model whose training has diverged. ResourceExhausted: there is no memory.
// Other errors are those of graphs and of `on_token`.
absl::StatusOr<Generated> Generate(CausalLmImpl& model,
                                   const LlamaConfig& config,
                                   const Prompts& prompts, int64_t max_tokens,
                                   const SamplingOptions& sampling,
                                   const fsdp::DeviceGraphMaker& make_graph,
                                   const OnToken& on_token);

// Tokens as people write and read them.

// Parses "1, 2 3": integers with commas or white space between them.
// InvalidArgument: something else is there.
absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text);

// Returns each byte as a token.
std::vector<int64_t> BytesOf(absl::string_view text);

// Returns the byte that a token is, and "?" for a token that is none.
std::string TextOf(int64_t token);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_GENERATOR_H_
