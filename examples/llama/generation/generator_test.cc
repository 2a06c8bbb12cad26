#include "examples/llama/generation/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"

namespace llama {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::FakeDeviceGraph;
using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

// Returns the CPU and the fake device, which captures steps.
std::vector<c10::Device> Devices() {
  FakeDevice::Register();
  return {at::kCPU, FakeDevice::device()};
}

// The tokens that were handed out behind each prompt, which are as many as the
// result says.
struct Outcome {
  Prompts tokens;
  absl::StatusOr<Generated> result;
};

Outcome RunWith(CausalLm model, const LlamaConfig& config,
                const Prompts& prompts, int64_t max_tokens,
                const SamplingOptions& sampling,
                c10::Device device = at::kCPU) {
  if (!device.is_cpu()) FakeDevice::Move(model->parameters());
  Prompts tokens(prompts.size());
  size_t all = 0;
  auto result = Generate(*model, config, prompts, max_tokens, sampling,
                         FakeDeviceGraph::Make, [&](size_t prompt, int64_t t) {
                           tokens[prompt].push_back(t);
                           ++all;
                           return absl::OkStatus();
                         });
  if (result.ok()) {
    EXPECT_EQ(result->tokens, static_cast<int64_t>(all));
    EXPECT_GE(result->time, absl::ZeroDuration());
    EXPECT_GT(result->prompt_time, absl::ZeroDuration());
  }
  return {tokens, std::move(result)};
}

Outcome RunWith(const LlamaConfig& config, const Prompts& prompts,
                int64_t max_tokens, const SamplingOptions& sampling,
                c10::Device device = at::kCPU) {
  return RunWith(ModelOf(config), config, prompts, max_tokens, sampling,
                 device);
}

SamplingOptions Greedy() {
  SamplingOptions options;
  options.temperature = 0;
  return options;
}

SamplingOptions Random() {
  SamplingOptions options;
  options.top_k = 30;
  options.top_p = 0.95;
  options.temperature = 1.2;
  options.seed = 9;
  return options;
}

int64_t Next(const SamplingOptions& sampling, const at::Tensor& logits) {
  return Draw(logits.unsqueeze(0), sampling).item<int64_t>();
}

// Computes all tokens each time, without a cache.
Tokens Naive(const LlamaConfig& config, const Tokens& prompt, int64_t count,
             const SamplingOptions& sampling) {
  const c10::NoGradGuard no_grad;
  CausalLm model = ModelOf(config);
  at::manual_seed(sampling.seed);
  Tokens all = prompt;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(
        Next(sampling, model->forward(at::tensor(all).unsqueeze(0))[0][-1]));
  }
  return {all.begin() + static_cast<int64_t>(prompt.size()), all.end()};
}

TEST(GeneratorTest, IsWhatTheWholeForwardGives) {
  for (const c10::Device device : Devices()) {
    for (const SamplingOptions& sampling : {Greedy(), Random()}) {
      for (const Tokens& prompt : {Tokens{5}, Tokens{1, 2, 3, 4, 5, 6, 7}}) {
        const Outcome run =
            RunWith(ConfigWith(), {prompt}, 20, sampling, device);
        ASSERT_OK(run.result);
        EXPECT_THAT(run.result->endings, ElementsAre(Ending::kMaxTokens));
        EXPECT_THAT(run.tokens,
                    ElementsAre(Naive(ConfigWith(), prompt, 20, sampling)));
      }
    }
  }
}

TEST(GeneratorTest, PromptsTogetherAreThoseAlone) {
  const Prompts even = {{5, 6}, {1, 2}, {2, 1}};
  const Prompts uneven = {{5}, {1, 2, 3, 4, 5, 6, 7}, {9, 8}};
  for (const c10::Device device : Devices()) {
    for (const Prompts& prompts : {even, uneven}) {
      const Outcome run = RunWith(ConfigWith(), prompts, 20, Greedy(), device);
      ASSERT_OK(run.result);
      for (size_t i = 0; i < prompts.size(); ++i) {
        EXPECT_EQ(run.tokens[i], Naive(ConfigWith(), prompts[i], 20, Greedy()))
            << i;
      }
    }
  }
}

TEST(GeneratorTest, OnePromptEndsBeforeTheOther) {
  const Prompts prompts = {{5}, {1, 2, 3}};
  const Tokens first = Naive(ConfigWith(), prompts[0], 20, Greedy());
  const Tokens second = Naive(ConfigWith(), prompts[1], 20, Greedy());
  const auto eos = absl::c_find_if(first, [&](int64_t token) {
    return !absl::c_linear_search(second, token);
  });
  ASSERT_NE(eos, first.end());
  const LlamaConfig config =
      ConfigWith(absl::StrCat(", \"eos_token_id\": ", *eos));
  for (const c10::Device device : Devices()) {
    const Outcome run = RunWith(config, prompts, 20, Greedy(), device);
    ASSERT_OK(run.result);
    EXPECT_THAT(run.result->endings,
                ElementsAre(Ending::kEos, Ending::kMaxTokens));
    EXPECT_THAT(run.tokens,
                ElementsAre(Tokens(first.begin(), eos + 1), second));
  }
}

TEST(GeneratorTest, OnePromptGoesOnBehindTheLastPositionOfTheOther) {
  LlamaConfig config = ConfigWith();
  config.max_position_embeddings = 64;  // all that the cache has room for
  const Prompts prompts = {Tokens(60, 5), {5, 1}};
  for (const c10::Device device : Devices()) {
    const Outcome run = RunWith(config, prompts, 30, Greedy(), device);
    ASSERT_OK(run.result);
    EXPECT_THAT(run.result->endings,
                ElementsAre(Ending::kMaxPositions, Ending::kMaxTokens));
    EXPECT_THAT(run.tokens,
                ElementsAre(Naive(config, prompts[0], 4, Greedy()),
                            Naive(config, prompts[1], 30, Greedy())));
  }
}

// Steps look at 256 tokens, and then at all that the cache has.
TEST(GeneratorTest, ReplaysDrawTheTokensOfTheCpu) {
  LlamaConfig config = ConfigWith();
  config.max_position_embeddings = 400;
  Tokens longest(250);
  for (size_t i = 0; i < longest.size(); ++i) {
    longest[i] = static_cast<int64_t>(i * i % 59);
  }
  const Prompts prompts = {longest, {1, 2, 3}};
  const Outcome cpu = RunWith(config, prompts, 24, Random());
  ASSERT_OK(cpu.result);
  FakeDevice::Register();
  FakeDevice::Reset();
  const Outcome run =
      RunWith(config, prompts, 24, Random(), FakeDevice::device());
  ASSERT_OK(run.result);
  EXPECT_EQ(run.tokens, cpu.tokens);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST(GeneratorTest, ATokenIsOneReplayAndOneCopyThatTheHostDoesNotWaitFor) {
  FakeDevice::Register();
  const auto costs = [](int64_t max_tokens) {
    FakeDevice::Reset();
    EXPECT_OK(RunWith(ConfigWith(), {Tokens{5}, Tokens{6, 7}}, max_tokens,
                      Random(), FakeDevice::device())
                  .result);
    return std::pair(FakeDevice::calls().operators, FakeDevice::HostWaits());
  };
  const auto few = costs(5);
  const auto many = costs(30);
  EXPECT_EQ(many.first - few.first, 25);
  EXPECT_EQ(many.second, few.second);
}

TEST(GeneratorTest, RefusesLogitsThatAreNotFinite) {
  for (const c10::Device device : Devices()) {
    for (const SamplingOptions& sampling : {Greedy(), Random()}) {
      CausalLm model = ModelOf(ConfigWith());
      {
        const c10::NoGradGuard no_grad;
        model->named_parameters()["lm_head.weight"][7].fill_(
            std::numeric_limits<double>::quiet_NaN());
      }
      const Outcome run =
          RunWith(model, ConfigWith(), {Tokens{5}}, 8, sampling, device);
      EXPECT_THAT(run.result, StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("logits are not finite")));
      EXPECT_THAT(run.tokens, ElementsAre(IsEmpty()));
    }
  }
}

TEST(GeneratorTest, StopsAtTheLastPosition) {
  const Outcome run = RunWith(ConfigWith(), {Tokens(33, 5)}, 8, Greedy());
  ASSERT_OK(run.result);
  EXPECT_THAT(run.result->endings, ElementsAre(Ending::kMaxPositions));
  EXPECT_EQ(run.tokens[0].size(), 7);
  const Outcome fits = RunWith(ConfigWith(), {Tokens(33, 5)}, 7, Greedy());
  ASSERT_OK(fits.result);
  EXPECT_THAT(fits.result->endings, ElementsAre(Ending::kMaxTokens));
}

TEST(GeneratorTest, EndsWithTheFirstError) {
  CausalLm model = ModelOf(ConfigWith());
  int calls = 0;
  EXPECT_THAT(Generate(*model, ConfigWith(), {Tokens{1}}, 8, Greedy(),
                       /*make_graph=*/nullptr,
                       [&](size_t, int64_t) {
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
  return at::randn({kVocab}, at::detail::createCPUGenerator(4)) * 2;
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

TEST(SamplingTest, ProbabilitiesAreAsDefined) {
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

std::vector<int64_t> Draw(const SamplingOptions& options, int tokens) {
  at::manual_seed(options.seed);
  std::vector<int64_t> drawn;
  drawn.reserve(tokens);
  for (int i = 0; i < tokens; ++i) drawn.push_back(Next(options, Logits()));
  return drawn;
}

TEST(SamplingTest, GreedyIsTheLikeliest) {
  const std::vector<int64_t> likeliest(10, Logits().argmax().item<int64_t>());
  EXPECT_EQ(Draw(Options(0, 0, 1), 10), likeliest);
  EXPECT_EQ(Draw(Options(2, 1, 1), 10), likeliest);
  EXPECT_EQ(Draw(Options(2, 0, 1e-9), 10), likeliest);
  EXPECT_EQ(Draw(Options(1e-300, 0, 1), 10), likeliest);
}

TEST(SamplingTest, TakesLogitsOfAnyPrecisionAndSize) {
  const at::Tensor logits = at::tensor({-3e38, 3e38, 0.0}).to(at::kBFloat16);
  EXPECT_EQ(Next(Options(0.5, 2, 0.5), logits), 1);
  const at::Tensor equal =
      Probabilities(at::zeros({4}, at::kBFloat16), Options(1, 3, 1));
  EXPECT_EQ(equal.gt(0).sum().item<int64_t>(), 3);
}

TEST(SamplingTest, DrawsAsMultinomialDoes) {
  const SamplingOptions options = Options(1.5, 20, 0.9, /*seed=*/3);
  at::manual_seed(options.seed);
  at::Generator generator =
      at::make_generator<at::CPUGeneratorImpl>(options.seed);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(Next(options, Logits()),
              at::multinomial(Probabilities(Logits(), options), 1,
                              /*replacement=*/true, generator)
                  .item<int64_t>());
  }
}

TEST(SamplingTest, MarksRowsThatAreNotFinite) {
  for (const double value : {std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    const at::Tensor logits = at::stack({Logits(), Logits()});
    logits[0][7] = value;
    for (const double temperature : {0.0, 1.0}) {
      const at::Tensor drawn = Draw(logits, Options(temperature, 0, 1));
      EXPECT_EQ(drawn[0].item<int64_t>(), kNotFinite);
      EXPECT_GE(drawn[1].item<int64_t>(), 0);
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

TEST(TokenTextTest, BytesAreTokensAndOtherTokensAreQuestionMarks) {
  EXPECT_THAT(BytesOf("a\xff"), ElementsAre(97, 255));
  EXPECT_EQ(TextOf(97), "a");
  EXPECT_EQ(TextOf(255), "\xff");
  EXPECT_EQ(TextOf(256), "?");
}

}  // namespace
}  // namespace llama
