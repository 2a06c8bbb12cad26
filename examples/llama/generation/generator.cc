#include "examples/llama/generation/generator.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "examples/llama/model/attention.h"

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
  const at::Tensor scaled =
      (exact - exact.amax(-1, /*keepdim=*/true)) / options.temperature;
  const int64_t vocab = scaled.size(-1);
  const int64_t k = options.top_k > 0 ? std::min(options.top_k, vocab) : vocab;
  if (k == vocab && options.top_p == 1) return at::softmax(scaled, -1);
  const auto [values, tokens] = at::topk(scaled, k);
  at::Tensor allowed = at::softmax(values, -1);
  if (options.top_p < 1) {
    const at::Tensor before = allowed.cumsum(-1) - allowed;
    allowed = allowed.masked_fill(before >= options.top_p, 0);
    allowed = allowed / allowed.sum(-1, /*keepdim=*/true);
  }
  return at::zeros_like(scaled).scatter(-1, tokens, allowed);
}

at::Tensor Draw(const at::Tensor& logits, const SamplingOptions& options) {
  at::Tensor scores = logits;
  if (options.temperature != 0) {
    // It is at::multinomial() without the host's look at the probabilities.
    const at::Tensor probabilities = Probabilities(logits, options);
    scores = probabilities / at::empty_like(probabilities).exponential_(1);
  }
  return scores.argmax(-1).masked_fill(
      at::isfinite(logits).all(-1).logical_not(), kNotFinite);
}

absl::Status CheckPrompts(const Prompts& prompts, const LlamaConfig& config) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto& prompt = prompts[i];
    const auto foreign = absl::c_find_if(prompt, [&config](int64_t token) {
      return token < 0 || token >= config.vocab_size;
    });
    std::string wrong;
    if (prompt.empty()) {
      wrong = "the prompt is empty: there has to be a token to begin with";
    } else if (prompt.size() >=
               static_cast<uint64_t>(config.max_position_embeddings)) {
      wrong = absl::StrCat("the prompt has ", prompt.size(),
                           " tokens, and the model's max_position_embeddings ",
                           "is ", config.max_position_embeddings,
                           ": nothing can come behind it");
    } else if (foreign != prompt.end()) {
      wrong = absl::StrCat("token ", *foreign, " of the prompt is outside of ",
                           "the model's vocabulary of ", config.vocab_size);
    }
    if (wrong.empty()) continue;
    return absl::InvalidArgumentError(
        prompts.size() == 1 ? wrong
                            : absl::StrCat("prompt ", i + 1, ": ", wrong));
  }
  return absl::OkStatus();
}

namespace {

using fsdp::TorchToStatus;

// A captured step looks at so many tokens of the cache, at twice as many when
// these are full, and so on: a generation has few captures.
constexpr int64_t kLeastCaptured = 256;
// GPUs take masks of such lengths as they are.
constexpr int64_t kMaskAlignment = 64;

// Draws tokens of all sequences of a batch, one of each at a time.
//
// Steps are CausalLmImpl::Step(), which finds tokens and positions on the
// device. Without a graph and for prompts of one length they are Continue(),
// whose position the host knows: it has no mask, and is faster on CPUs.
class Sequences {
 public:
  // `graph` is null if steps are not to be captured. `cache` has room for all
  // tokens but those drawn last.
  Sequences(CausalLmImpl& model, KvCache cache, const SamplingOptions& sampling,
            std::unique_ptr<fsdp::DeviceGraph> graph)
      : model_(model),
        cache_(std::move(cache)),
        device_(cache_.layers.front().keys.device()),
        sampling_(sampling),
        graph_(std::move(graph)),
        stream_(device_) {
    at::Generator generator = at::globalContext().defaultGenerator(device_);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(sampling.seed);
  }

  // Memory goes, which the device may still use.
  ~Sequences() {
    TorchToStatus("waiting for the device", [this] {
      fsdp::Synchronize(device_);
    }).IgnoreError();
  }

  // Lets the device draw a token behind each prompt. Comes first.
  absl::Status Begin(const Prompts& prompts);
  // Lets it draw the token behind that.
  absl::Status Step();
  // Counts the calls of these whose tokens were not taken.
  size_t waiting() const { return readings_.size(); }
  // Waits for the oldest of these tokens: int64 [batch] on the CPU.
  absl::StatusOr<at::Tensor> Take();

 private:
  absl::Status Run(int64_t end);
  absl::Status RunAndCapture(int64_t end);
  absl::Status Read();

  CausalLmImpl& model_;
  KvCache cache_;
  const c10::Device device_;
  const SamplingOptions sampling_;
  bool is_even_ = true;   // all prompts have one length
  int64_t tokens_ = 0;    // that the longest sequence has in the cache
  at::Tensor drawn_;      // [batch], the last tokens, on the device
  at::Tensor positions_;  // [batch], where these go
  std::deque<fsdp::HostCopy> readings_;
  const std::unique_ptr<fsdp::DeviceGraph> graph_;
  fsdp::SideStream stream_;  // for captures
  int64_t captured_ = 0;     // the graph looks at so many tokens
};

absl::Status Sequences::Begin(const Prompts& prompts) {
  for (const auto& prompt : prompts) {
    is_even_ = is_even_ && prompt.size() == prompts.front().size();
    tokens_ = std::max(tokens_, static_cast<int64_t>(prompt.size()));
  }
  // No token sees the padding behind its prompt, and later ones replace it.
  std::vector<int64_t> padded, last, sizes;
  for (const auto& prompt : prompts) {
    padded.insert(padded.end(), prompt.begin(), prompt.end());
    last.push_back(static_cast<int64_t>(padded.size()) - 1);
    sizes.push_back(static_cast<int64_t>(prompt.size()));
    padded.resize(sizes.size() * static_cast<size_t>(tokens_));
  }
  FSDP_RETURN_IF_ERROR(TorchToStatus("computing logits", [&] {
    const auto there = [&](const std::vector<int64_t>& values) {
      return at::tensor(values).to(device_);
    };
    positions_ = there(sizes);
    drawn_ = Draw(model_.Continue(there(padded).view({cache_.batch, tokens_}),
                                  cache_, there(last)),
                  sampling_);
  }));
  return Read();
}

absl::Status Sequences::Step() {
  const int64_t needed = std::min(++tokens_, cache_.max_tokens);
  if (graph_ == nullptr) {
    FSDP_RETURN_IF_ERROR(Run(needed));
    return Read();
  }
  int64_t end = kLeastCaptured;
  while (end < needed) end *= 2;
  end = std::min(end, cache_.max_tokens);
  FSDP_RETURN_IF_ERROR(end == captured_ ? graph_->Replay()
                                        : RunAndCapture(end));
  return Read();
}

// Computes and draws. Step() looks at tokens before `end`.
absl::Status Sequences::Run(int64_t end) {
  return TorchToStatus("computing logits", [&] {
    const at::Tensor tokens = drawn_.clamp_min(0);  // kNotFinite is no token
    const at::Tensor logits =
        graph_ == nullptr && is_even_
            ? model_.Continue(tokens.unsqueeze(1), cache_)
            : model_.Step(tokens, positions_, cache_, end);
    drawn_.copy_(Draw(logits, sampling_));
    // Sequences that are over go on until all are.
    positions_.add_(1).clamp_max_(cache_.max_tokens - 1);
  });
}

// Does a step, in which libraries set up what they need for its sizes and
// stream, and captures those that follow.
absl::Status Sequences::RunAndCapture(int64_t end) {
  absl::Status status =
      TorchToStatus("capturing a step", [&]() -> absl::Status {
        fsdp::Synchronize(device_);  // replays use the graph's memory
        graph_->Reset();
        stream_.FollowCurrentStream();
        {
          const fsdp::SideStream::Scope scope(stream_);
          FSDP_RETURN_IF_ERROR(Run(end));
          FSDP_RETURN_IF_ERROR(graph_->BeginCapture());
          FSDP_RETURN_IF_ERROR(Run(end));
          FSDP_RETURN_IF_ERROR(graph_->EndCapture());
        }
        stream_.BlockCurrentStream();
        captured_ = end;
        return absl::OkStatus();
      });
  if (!status.ok()) graph_->Reset();
  return status;
}

absl::Status Sequences::Read() {
  return TorchToStatus("reading tokens",
                       [&] { readings_.push_back(fsdp::CopyToHost(drawn_)); });
}

absl::StatusOr<at::Tensor> Sequences::Take() {
  const fsdp::HostCopy reading = std::move(readings_.front());
  readings_.pop_front();
  FSDP_RETURN_IF_ERROR(TorchToStatus("waiting for tokens", [&] {
    reading.is_there.Wait(absl::InfiniteFuture());
  }));
  return reading.values;
}

}  // namespace

absl::StatusOr<Generated> Generate(CausalLmImpl& model,
                                   const LlamaConfig& config,
                                   const Prompts& prompts, int64_t max_tokens,
                                   const SamplingOptions& sampling,
                                   const fsdp::DeviceGraphMaker& make_graph,
                                   const OnToken& on_token) {
  Generated generated;
  std::vector<int64_t> most;  // tokens behind each prompt
  int64_t longest = 0;        // of the prompts with these
  for (const auto& prompt : prompts) {
    const auto size = static_cast<int64_t>(prompt.size());
    const int64_t room = config.max_position_embeddings - size;
    most.push_back(std::min(max_tokens, room));
    longest = std::max(longest, size + most.back());
    generated.endings.push_back(room < max_tokens ? Ending::kMaxPositions
                                                  : Ending::kMaxTokens);
  }
  const int64_t draws = *absl::c_max_element(most);
  const at::TensorOptions parameters = model.parameters().front().options();
  const bool has_streams = fsdp::HasStreams(parameters.device());
  std::unique_ptr<fsdp::DeviceGraph> graph;
  if (has_streams && make_graph != nullptr) {
    FSDP_ASSIGN_OR_RETURN(graph, make_graph(parameters.device()));
  }
  KvCache cache;
  FSDP_RETURN_IF_ERROR(TorchToStatus("making room for keys and values", [&] {
    cache = MakeKvCache(
        config, static_cast<int64_t>(prompts.size()),
        (longest + kMaskAlignment - 1) / kMaskAlignment * kMaskAlignment,
        parameters);
  }));

  const absl::Time begin = absl::Now();
  absl::Time first = begin;
  Sequences sequences(model, std::move(cache), sampling, std::move(graph));
  FSDP_RETURN_IF_ERROR(sequences.Begin(prompts));
  std::vector<bool> is_over(prompts.size(), false);
  size_t running = prompts.size();
  int64_t drawn = 1;
  for (int64_t n = 1; running > 0; ++n) {
    // Behind the first token, a device computes the next one while the host
    // hands one out.
    const size_t ahead = has_streams && n > 1 ? 2 : 1;
    for (; sequences.waiting() < ahead && drawn < draws; ++drawn) {
      FSDP_RETURN_IF_ERROR(sequences.Step());
    }
    FSDP_ASSIGN_OR_RETURN(const at::Tensor tokens, sequences.Take());
    if (n == 1) first = absl::Now();
    for (size_t i = 0; i < prompts.size(); ++i) {
      if (is_over[i]) continue;
      const int64_t token = tokens.const_data_ptr<int64_t>()[i];
      if (token == kNotFinite) {
        return absl::FailedPreconditionError(
            "the model's logits are not finite: its training has diverged, or "
            "its files are of another model");
      }
      ++generated.tokens;
      FSDP_RETURN_IF_ERROR(on_token(i, token));
      const bool is_eos = absl::c_linear_search(config.eos_token_ids, token);
      if (is_eos) generated.endings[i] = Ending::kEos;
      is_over[i] = is_eos || n == most[i];
      if (is_over[i]) --running;
    }
  }
  generated.prompt_time = first - begin;
  generated.time = absl::Now() - first;
  return generated;
}

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

std::string TextOf(int64_t token) {
  return token > 255 ? "?" : std::string(1, static_cast<char>(token));
}

}  // namespace llama
