#include "examples/llama/generation/generator.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Tokens = std::vector<int64_t>;

LlamaConfig ConfigWith(const std::string& more = "") {
  const auto config = ParseLlamaConfig(absl::StrCat(R"({
      "model_type": "qwen3", "vocab_size": 60, "hidden_size": 24,
      "intermediate_size": 32, "num_hidden_layers": 2,
      "num_attention_heads": 4, "num_key_value_heads": 2,
      "max_position_embeddings": 40)",
                                                    more, "}"));
  EXPECT_OK(config);
  return *config;
}

CausalLm ModelOf(const LlamaConfig& config) {
  CausalLm model(config);
  InitializeParameters(*model, /*seed=*/2, /*stddev=*/0.3);
  return model;
}

// The tokens that were handed out, which are as many as the result says.
struct Outcome {
  Tokens tokens;
  absl::StatusOr<Generated> result;
};

Outcome RunWith(const LlamaConfig& config, const Tokens& prompt,
                int64_t max_tokens, const SamplingOptions& sampling) {
  CausalLm model = ModelOf(config);
  Tokens tokens;
  auto result =
      Generate(*model, config, prompt, max_tokens, sampling, [&](int64_t t) {
        tokens.push_back(t);
        return absl::OkStatus();
      });
  if (result.ok()) {
    EXPECT_EQ(result->tokens, static_cast<int64_t>(tokens.size()));
    EXPECT_GE(result->time, absl::ZeroDuration());
    EXPECT_GT(result->prompt_time, absl::ZeroDuration());
  }
  return {tokens, std::move(result)};
}

SamplingOptions Greedy() {
  SamplingOptions options;
  options.temperature = 0;
  return options;
}

// Computes all tokens each time, without a cache.
Tokens Naive(const LlamaConfig& config, const Tokens& prompt, int64_t count,
             const SamplingOptions& sampling) {
  const c10::NoGradGuard no_grad;
  CausalLm model = ModelOf(config);
  Sampler sampler(sampling);
  Tokens all = prompt;
  for (int64_t i = 0; i < count; ++i) {
    const auto token =
        sampler.Next(model->forward(at::tensor(all).unsqueeze(0))[0][-1]);
    EXPECT_OK(token);
    all.push_back(*token);
  }
  return {all.begin() + static_cast<int64_t>(prompt.size()), all.end()};
}

TEST(GeneratorTest, IsWhatTheWholeForwardGives) {
  SamplingOptions random;
  random.top_k = 30;
  random.top_p = 0.95;
  random.temperature = 1.2;
  random.seed = 9;
  for (const SamplingOptions& sampling : {Greedy(), random}) {
    for (const Tokens& prompt : {Tokens{5}, Tokens{1, 2, 3, 4, 5, 6, 7}}) {
      const Outcome run = RunWith(ConfigWith(), prompt, 20, sampling);
      ASSERT_OK(run.result);
      EXPECT_EQ(run.result->ending, Ending::kMaxTokens);
      EXPECT_EQ(run.tokens, Naive(ConfigWith(), prompt, 20, sampling));
    }
  }
}

TEST(GeneratorTest, StopsBehindAnEndOfText) {
  const Tokens all = Naive(ConfigWith(), {5}, 20, Greedy());
  for (const size_t at : {0, 6}) {
    const LlamaConfig config =
        ConfigWith(absl::StrCat(", \"eos_token_id\": [", all[at], ", 59]"));
    const Outcome run = RunWith(config, {5}, 20, Greedy());
    ASSERT_OK(run.result);
    EXPECT_EQ(run.result->ending, Ending::kEos);
    const auto end = std::find(all.begin(), all.end(), all[at]) + 1;
    EXPECT_EQ(run.tokens, Tokens(all.begin(), end));
  }
}

TEST(GeneratorTest, StopsAtTheLastPosition) {
  const Outcome run = RunWith(ConfigWith(), Tokens(33, 5), 8, Greedy());
  ASSERT_OK(run.result);
  EXPECT_EQ(run.result->ending, Ending::kMaxPositions);
  EXPECT_EQ(run.tokens.size(), 7);
  const Outcome fits = RunWith(ConfigWith(), Tokens(33, 5), 7, Greedy());
  ASSERT_OK(fits.result);
  EXPECT_EQ(fits.result->ending, Ending::kMaxTokens);
}

TEST(GeneratorTest, RefusesPromptsThatCannotBe) {
  const std::pair<Tokens, std::string> cases[] = {
      {{}, "empty"},
      {Tokens(40, 5), "40 tokens"},
      {{1, 60}, "token 60 of the prompt is outside of the model's vocabulary"},
      {{-1}, "token -1"}};
  for (const auto& [prompt, text] : cases) {
    const Outcome run = RunWith(ConfigWith(), prompt, 8, Greedy());
    EXPECT_THAT(run.result,
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
    EXPECT_TRUE(run.tokens.empty());
  }
  SamplingOptions wrong;
  wrong.top_p = 2;
  EXPECT_THAT(
      RunWith(ConfigWith(), {1}, 8, wrong).result,
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("--top_p=2")));
}

TEST(GeneratorTest, EndsWithTheFirstError) {
  CausalLm model = ModelOf(ConfigWith());
  int calls = 0;
  EXPECT_THAT(Generate(*model, ConfigWith(), {1}, 8, Greedy(),
                       [&](int64_t) {
                         return ++calls < 3 ? absl::OkStatus()
                                            : absl::DataLossError("full");
                       }),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("full")));
  EXPECT_EQ(calls, 3);
}

constexpr int64_t kVocab = 50;

SamplingOptions Options(double temperature, int64_t top_k, double top_p,
                        uint64_t seed = 0) {
  SamplingOptions options;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.seed = seed;
  return options;
}

at::Tensor Logits() {
  at::manual_seed(4);
  return at::randn({kVocab}) * 2;
}

std::vector<double> Normalized(std::vector<double> weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (double& weight : weights) weight /= sum;
  return weights;
}

// Follows the definition, token by token.
std::vector<double> ByDefinition(const at::Tensor& logits,
                                 const SamplingOptions& options) {
  std::vector<double> p(kVocab);
  for (int64_t i = 0; i < kVocab; ++i) {
    p[i] = std::exp(logits[i].item<double>() / options.temperature);
  }
  std::vector<int64_t> order(kVocab);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return p[a] > p[b]; });
  for (int64_t i = 0; i < kVocab; ++i) {
    if (options.top_k > 0 && i >= options.top_k) p[order[i]] = 0;
  }
  p = Normalized(p);
  double sum = 0;
  for (const int64_t token : order) {
    const double own = p[token];
    if (sum >= options.top_p) p[token] = 0;
    sum += own;
  }
  return Normalized(p);
}

TEST(SamplerTest, ProbabilitiesAreAsDefined) {
  const at::Tensor logits = Logits();
  for (const double temperature : {0.3, 1.0, 2.5}) {
    for (const int64_t top_k : {0, 1, 7, 50, 1000}) {
      for (const double top_p : {0.001, 0.4, 0.9, 1.0}) {
        const SamplingOptions options = Options(temperature, top_k, top_p);
        const at::Tensor p = Probabilities(logits, options);
        EXPECT_NEAR(p.sum().item<double>(), 1, 1e-12);
        EXPECT_TRUE(
            p.allclose(at::tensor(ByDefinition(logits, options)), 1e-9, 1e-12))
            << temperature << " " << top_k << " " << top_p;
      }
    }
  }
}

TEST(SamplerTest, ManyTokensAreAsProbable) {
  constexpr int kDraws = 20000;
  const SamplingOptions options = Options(1.5, 20, 0.9, /*seed=*/3);
  const at::Tensor logits = Logits();
  const std::vector<double> p = ByDefinition(logits, options);
  std::vector<int> count(kVocab, 0);
  Sampler sampler(options);
  for (int i = 0; i < kDraws; ++i) {
    ASSERT_OK_AND_ASSIGN(const int64_t token, sampler.Next(logits));
    ++count.at(token);
  }
  for (int64_t i = 0; i < kVocab; ++i) {
    const double deviation = std::sqrt(kDraws * p[i] * (1 - p[i]));
    EXPECT_NEAR(count[i], kDraws * p[i], 4.5 * deviation) << i;
  }
}

std::vector<int64_t> Draw(const SamplingOptions& options, int tokens) {
  Sampler sampler(options);
  std::vector<int64_t> drawn;
  for (int i = 0; i < tokens; ++i) {
    const auto token = sampler.Next(Logits());
    EXPECT_OK(token);
    drawn.push_back(*token);
  }
  return drawn;
}

TEST(SamplerTest, SeedsDecide) {
  EXPECT_EQ(Draw(Options(1, 0, 1, 5), 40), Draw(Options(1, 0, 1, 5), 40));
  EXPECT_NE(Draw(Options(1, 0, 1, 5), 40), Draw(Options(1, 0, 1, 6), 40));
}

TEST(SamplerTest, GreedyIsTheLikeliest) {
  const std::vector<int64_t> likeliest(10, Logits().argmax().item<int64_t>());
  EXPECT_EQ(Draw(Options(0, 0, 1), 10), likeliest);
  EXPECT_EQ(Draw(Options(2, 1, 1), 10), likeliest);
  EXPECT_EQ(Draw(Options(2, 0, 1e-9), 10), likeliest);
  EXPECT_EQ(Draw(Options(1e-300, 0, 1), 10), likeliest);
}

TEST(SamplerTest, TakesLogitsOfAnyPrecisionAndSize) {
  const at::Tensor logits = at::tensor({-3e38, 3e38, 0.0}).to(at::kBFloat16);
  ASSERT_OK_AND_ASSIGN(const int64_t token,
                       Sampler(Options(0.5, 2, 0.5)).Next(logits));
  EXPECT_EQ(token, 1);
  const at::Tensor equal =
      Probabilities(at::zeros({4}, at::kBFloat16), Options(1, 3, 1));
  EXPECT_EQ(equal.gt(0).sum().item<int64_t>(), 3);
}

TEST(SamplerTest, RefusesLogitsThatAreNotFinite) {
  for (const double value : {std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    const at::Tensor logits = Logits();
    logits[7] = value;
    for (const double temperature : {0.0, 1.0}) {
      EXPECT_THAT(Sampler(Options(temperature, 0, 1)).Next(logits),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("not finite")));
    }
  }
}

TEST(TokenTextTest, TokensAreNumbersWithAnythingBetween) {
  for (const char* const text :
       {"1,2,3", " 1 2\n3\n", "1, 2,\t3,", "1\r\n2\r\n3"}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> tokens, ParseTokens(text));
    EXPECT_THAT(tokens, ElementsAre(1, 2, 3)) << text;
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<int64_t> none, ParseTokens(" \n"));
  EXPECT_TRUE(none.empty());
  for (const char* const text :
       {"1 two", "1.5", "0x10", "99999999999999999999"}) {
    EXPECT_THAT(ParseTokens(text), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("is no token")))
        << text;
  }
}

// Returns what is shown after each byte.
std::string Shown(absl::string_view text) {
  std::vector<std::string> parts;
  PrintableText printable;
  for (const int64_t byte : BytesOf(text)) parts.push_back(printable.Add(byte));
  parts.push_back(printable.Finish());
  EXPECT_EQ(printable.Finish(), "");
  return absl::StrJoin(parts, "|");
}

TEST(TokenTextTest, CharactersAreShownWhenTheyAreWhole) {
  EXPECT_EQ(Shown(""), "");
  EXPECT_EQ(Shown("a\n\t"), "a|\n|\t|");
  EXPECT_EQ(Shown("\u00f6"), "|\u00f6|");
  EXPECT_EQ(Shown("a\U0001f98a"), "a||||\U0001f98a|");
}

TEST(TokenTextTest, WhatIsNoTextIsAQuestionMark) {
  const std::pair<absl::string_view, std::string> cases[] = {
      {"\x1b[", "?|[|"},    // terminals take it for a command
      {"\xc2\x9b", "|?|"},  // the same as one character
      {"\xff", "?|"},
      {"\x80", "?|"},                  // never first in UTF-8
      {"\xc3", "|?"},                  // cut off at the end
      {"\xc3g", "|?g|"},               // cut off by another character
      {"\xe2\x82g", "||??g|"},         // the same for several bytes
      {"\xc3\xc3\xb6", "|?|\u00f6|"},  // cut off by one that is as long
      {"\xed\xa0\x80", "||???|"},      // half of a pair
  };
  for (const auto& [text, shown] : cases) EXPECT_EQ(Shown(text), shown);
}

TEST(TokenTextTest, TokensThatAreNoBytesAreQuestionMarks) {
  PrintableText printable;
  EXPECT_EQ(printable.Add(256), "?");
  EXPECT_EQ(printable.Add(0xC3), "");
  EXPECT_EQ(printable.Add(300), "??");
  EXPECT_EQ(printable.Add('a'), "a");
  EXPECT_THAT(BytesOf("a\xff"), ElementsAre(97, 255));
}

}  // namespace
}  // namespace llama
