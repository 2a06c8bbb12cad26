#include "examples/llama/generation/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "base/utf8.h"
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
  const at::TensorOptions parameters = model.parameters().front().options();
  KvCache cache;
  FSDP_RETURN_IF_ERROR(
      fsdp::TorchToStatus("making room for keys and values", [&] {
        cache =
            MakeKvCache(config, /*batch=*/1, prompt_tokens + most, parameters);
      }));

  Generated generated;
  generated.ending =
      room < max_tokens ? Ending::kMaxPositions : Ending::kMaxTokens;
  const absl::Time begin = absl::Now();
  absl::Time first = begin;
  Sampler sampler(sampling);
  std::vector<int64_t> tokens = prompt;  // that the cache does not have
  while (generated.tokens < most) {
    at::Tensor logits;
    FSDP_RETURN_IF_ERROR(fsdp::TorchToStatus("computing logits", [&] {
      const at::Tensor next =
          at::tensor(tokens).unsqueeze(0).to(parameters.device());
      logits = model.Continue(next, cache)[0].cpu();
    }));
    FSDP_ASSIGN_OR_RETURN(const int64_t token, sampler.Next(logits));
    if (++generated.tokens == 1) first = absl::Now();
    FSDP_RETURN_IF_ERROR(on_token(token));
    if (absl::c_linear_search(config.eos_token_ids, token)) {
      generated.ending = Ending::kEos;
      break;
    }
    tokens = {token};
  }
  generated.prompt_time = first - begin;
  generated.time = absl::Now() - first;
  return generated;
}

namespace {

// Returns the length of the UTF-8 sequence that `first` begins, or else 1.
size_t LengthBy(unsigned char first) {
  if (first < 0xC2 || first > 0xF4) return 1;
  return first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
}

bool MayBecomeCharacter(absl::string_view text) {
  return text.size() < LengthBy(static_cast<unsigned char>(text[0])) &&
         absl::c_all_of(text.substr(1), [](unsigned char byte) {
           return (byte & 0xC0) == 0x80;
         });
}

// `character` is one character of UTF-8.
std::string Shown(absl::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  const bool is_shown =
      character.size() == 1
          ? absl::ascii_isprint(first) || first == '\n' || first == '\t'
          // U+0080 to U+009F are control characters, too.
          : first != 0xC2 || static_cast<unsigned char>(character[1]) >= 0xA0;
  return is_shown ? std::string(character) : "?";
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ParseTokens(absl::string_view text) {
  std::vector<int64_t> tokens;
  for (const absl::string_view part :
       absl::StrSplit(text, absl::ByAnyChar(", \t\r\n"), absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(part, &tokens.emplace_back())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", part, "\" is no token: tokens are numbers, such as 1,2,3"));
    }
  }
  return tokens;
}

std::vector<int64_t> BytesOf(absl::string_view text) {
  std::vector<int64_t> bytes;
  bytes.reserve(text.size());
  for (const char byte : text) bytes.push_back(static_cast<uint8_t>(byte));
  return bytes;
}

std::string PrintableText::Add(int64_t token) {
  if (token > 255) return absl::StrCat(Finish(), "?");
  waiting_.push_back(static_cast<char>(token));
  std::string shown;
  while (!waiting_.empty()) {
    const size_t length = fsdp::Utf8Length(waiting_);
    if (length == 0 && MayBecomeCharacter(waiting_)) break;
    const size_t done = length == 0 ? 1 : length;
    shown += length == 0 ? "?" : Shown(waiting_.substr(0, length));
    waiting_.erase(0, done);
  }
  return shown;
}

std::string PrintableText::Finish() {
  const std::string shown = waiting_.empty() ? "" : "?";
  waiting_.clear();
  return shown;
}

}  // namespace llama
