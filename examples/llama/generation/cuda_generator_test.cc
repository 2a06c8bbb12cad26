// Steps that a GPU replays draw the tokens of the CPU. Needs a GPU.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>

#include "base/device_graph.h"
#include "base/testing/status_matchers.h"
#include "examples/llama/generation/generator.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {
namespace {

constexpr int64_t kTokens = 24;

Prompts TokensOf(const SamplingOptions& sampling, c10::Device device,
                 c10::ScalarType dtype = at::kFloat) {
  const auto config = ParseLlamaConfig(R"({
      "model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64,
      "intermediate_size": 96, "num_hidden_layers": 2,
      "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
      "max_position_embeddings": 400})");
  EXPECT_OK(config);
  CausalLm model(*config);
  InitializeParameters(*model, /*seed=*/2, /*stddev=*/0.2);
  model->to(device, dtype);
  // Attention looks at 256 tokens, and then at more.
  Prompts prompts = {{}, {1, 2, 3}, {999}};
  for (int64_t i = 0; i < 245; ++i) prompts[0].push_back(i * i % 997);
  Prompts tokens(prompts.size());
  EXPECT_OK(Generate(*model, *config, prompts, kTokens, sampling,
                     fsdp::MakeCudaGraph, [&](size_t prompt, int64_t token) {
                       tokens[prompt].push_back(token);
                       return absl::OkStatus();
                     }));
  return tokens;
}

TEST(CudaGeneratorTest, TheLikeliestTokensAreThoseOfTheCpu) {
  SamplingOptions greedy;
  greedy.temperature = 0;
  EXPECT_EQ(TokensOf(greedy, c10::Device(c10::kCUDA, 0), at::kFloat),
            TokensOf(greedy, at::kCPU));
}

TEST(CudaGeneratorTest, SeedsDecide) {
  const c10::Device gpu(c10::kCUDA, 0);
  SamplingOptions random;
  for (const int64_t top_k : {0, 50}) {
    for (const double top_p : {1.0, 0.9}) {
      random.top_k = top_k;
      random.top_p = top_p;
      random.seed = 1;
      const Prompts first = TokensOf(random, gpu, at::kBFloat16);
      for (const auto& tokens : first) EXPECT_EQ(tokens.size(), kTokens);
      EXPECT_EQ(TokensOf(random, gpu, at::kBFloat16), first);
      random.seed = 2;
      EXPECT_NE(TokensOf(random, gpu, at::kBFloat16), first);
    }
  }
}

}  // namespace
}  // namespace llama
