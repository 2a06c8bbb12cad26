// Continues a text with a trained model.
#ifndef TESTING_GPT_MODEL_SAMPLER_H_
#define TESTING_GPT_MODEL_SAMPLER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace gpt {

struct SamplerOptions {
  int64_t num_bytes = 0;
  int64_t seq = 0;           // the longest input of the model
  double temperature = 0.8;  // below 1: likely bytes become likelier
  uint64_t seed = 0;
};

// Turns tokens [1, tokens] into logits [1, tokens, vocab].
using LogitsFunction = std::function<at::Tensor(const at::Tensor& tokens)>;

// Returns the bytes that follow `prompt`, which is not empty. Calls `logits`
// num_bytes times, so that the ranks of a sharded model stay together. Throws
// what `logits` throws.
std::string Sample(const LogitsFunction& logits, absl::string_view prompt,
                   const SamplerOptions& options);

// Returns `text` with '?' for what a terminal could take for a command and for
// what is not ASCII; newlines and tabs stay.
std::string Printable(absl::string_view text);

}  // namespace gpt

#endif  // TESTING_GPT_MODEL_SAMPLER_H_
