// Which token comes next.
#ifndef EXAMPLES_LLAMA_GENERATION_SAMPLER_H_
#define EXAMPLES_LLAMA_GENERATION_SAMPLER_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

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

}  // namespace llama

#endif  // EXAMPLES_LLAMA_GENERATION_SAMPLER_H_
