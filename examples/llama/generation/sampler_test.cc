#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/generation/generator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

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
std::vector<double> Naive(const at::Tensor& logits,
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
        EXPECT_TRUE(p.allclose(at::tensor(Naive(logits, options)), 1e-9, 1e-12))
            << temperature << " " << top_k << " " << top_p;
      }
    }
  }
}

TEST(SamplerTest, ManyTokensAreAsProbable) {
  constexpr int kDraws = 20000;
  const SamplingOptions options = Options(1.5, 20, 0.9, /*seed=*/3);
  const at::Tensor logits = Logits();
  const std::vector<double> p = Naive(logits, options);
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

}  // namespace
}  // namespace llama
