#include "examples/llama/generation/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

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
  // Values are at most 0, so that no temperature makes infinities that cancel.
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

namespace {

class Sequence {
 public:
  Sequence(CausalLmImpl& model, const LlamaConfig& config,
           const SamplingOptions& sampling)
      : model_(model), config_(config), sampler_(sampling) {}

  // Makes room for so many tokens.
  absl::Status Reserve(int64_t tokens) {
    return fsdp::TorchToStatus("making room for keys and values", [&] {
      cache_ = MakeKvCache(config_, /*batch=*/1, tokens,
                           model_.parameters().front().options());
    });
  }

  // Returns the token behind `tokens`, which follow those of earlier calls.
  absl::StatusOr<int64_t> Next(const std::vector<int64_t>& tokens) {
    at::Tensor logits;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("computing logits", [&] {
      const c10::Device device = model_.parameters().front().device();
      logits =
          model_.Continue(at::tensor(tokens).unsqueeze(0).to(device), cache_)[0]
              .cpu();
    }));
    return sampler_.Next(logits);
  }

  bool Ends(int64_t token) const {
    return absl::c_linear_search(config_.eos_token_ids, token);
  }

 private:
  CausalLmImpl& model_;
  const LlamaConfig& config_;
  Sampler sampler_;
  KvCache cache_;
};

}  // namespace

absl::Status CheckPrompt(const std::vector<int64_t>& prompt,
                         const LlamaConfig& config) {
  if (prompt.empty()) {
    return absl::InvalidArgumentError(
        "the prompt is empty: there has to be a token to begin with");
  }
  if (prompt.size() >= static_cast<uint64_t>(config.max_position_embeddings)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the prompt has ", prompt.size(), " tokens, and the model's ",
        "max_position_embeddings is ", config.max_position_embeddings,
        ": nothing can come behind it"));
  }
  for (const int64_t token : prompt) {
    if (token >= 0 && token < config.vocab_size) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("token ", token, " of the prompt is outside of the ",
                     "model's vocabulary of ", config.vocab_size));
  }
  return absl::OkStatus();
}

absl::StatusOr<Generated> Generate(CausalLmImpl& model,
                                   const LlamaConfig& config,
                                   const std::vector<int64_t>& prompt,
                                   int64_t max_tokens,
                                   const SamplingOptions& sampling,
                                   const OnToken& on_token) {
  FSDP_RETURN_IF_ERROR(Check(sampling));
  FSDP_RETURN_IF_ERROR(CheckPrompt(prompt, config));
  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  const int64_t room = config.max_position_embeddings - prompt_tokens;
  const int64_t most = std::min(max_tokens, room);
  Sequence sequence(model, config, sampling);
  FSDP_RETURN_IF_ERROR(sequence.Reserve(prompt_tokens + most));

  Generated generated;
  generated.ending =
      room < max_tokens ? Ending::kMaxPositions : Ending::kMaxTokens;
  const absl::Time begin = absl::Now();
  absl::Time first = begin;
  std::vector<int64_t> tokens = prompt;
  while (generated.tokens < most) {
    FSDP_ASSIGN_OR_RETURN(const int64_t token, sequence.Next(tokens));
    if (++generated.tokens == 1) first = absl::Now();
    FSDP_RETURN_IF_ERROR(on_token(token));
    if (sequence.Ends(token)) {
      generated.ending = Ending::kEos;
      break;
    }
    tokens = {token};
  }
  generated.prompt_time = first - begin;
  generated.time = absl::Now() - first;
  return generated;
}

}  // namespace llama
