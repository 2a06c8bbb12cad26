#include "examples/llama/generation/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace llama {

absl::Status Check(const SamplingOptions& options) {
  if (!(options.temperature >= 0 && std::isfinite(options.temperature))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--temperature=", options.temperature, ": take 0 or more"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--top_k=", options.top_k, ": take at least 1, or 0 for all tokens"));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--top_p=", options.top_p, ": take one above 0, and 1 for all tokens"));
  }
  return absl::OkStatus();
}

at::Tensor Probabilities(const at::Tensor& logits,
                         const SamplingOptions& options) {
  const at::Tensor exact = logits.to(at::kDouble);
  // Below 0, so that no temperature makes infinities that cancel.
  const at::Tensor scaled = (exact - exact.max()) / options.temperature;
  const int64_t vocab = scaled.size(0);
  const int64_t k = options.top_k > 0 ? std::min(options.top_k, vocab) : vocab;
  if (k == vocab && options.top_p == 1) return at::softmax(scaled, 0);
  const auto [values, tokens] = at::topk(scaled, k);
  at::Tensor allowed = at::softmax(values, 0);
  if (options.top_p < 1) {
    const at::Tensor before = allowed.cumsum(0) - allowed;
    allowed = allowed.masked_fill(before >= options.top_p, 0);
    allowed = allowed / allowed.sum();
  }
  return at::zeros_like(scaled).scatter(0, tokens, allowed);
}

Sampler::Sampler(const SamplingOptions& options)
    : options_(options),
      generator_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {}

absl::StatusOr<int64_t> Sampler::Next(const at::Tensor& logits) {
  if (!at::isfinite(logits).all().item<bool>()) {
    return absl::FailedPreconditionError(
        "the model's logits are not finite: its training has diverged, or its "
        "files are of another model");
  }
  if (options_.temperature == 0) return logits.argmax().item<int64_t>();
  return at::multinomial(Probabilities(logits, options_), /*num_samples=*/1,
                         /*replacement=*/true, generator_)
      .item<int64_t>();
}

}  // namespace llama
