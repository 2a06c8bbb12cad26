#include "examples/llama/generation/generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
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
  for (at::Tensor& parameter : model->parameters()) {
    const c10::NoGradGuard no_grad;
    parameter.fill_(NAN);
  }
  EXPECT_THAT(
      Generate(*model, ConfigWith(), {1}, 8, Greedy(),
               [](int64_t) { return absl::OkStatus(); }),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not finite")));
}

}  // namespace
}  // namespace llama
