#include "examples/llama/model/llama_config.h"
#include "examples/llama/report/progress.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

// Llama 3 8B has 8.03e9 parameters, of which 128,256 x 4096 are the embedding
// and 4096 x 65 the norms.
TEST(FlopsTest, CountsTheWeightsOfLlama38B) {
  LlamaConfig config{};
  config.vocab_size = 128256;
  config.hidden_size = 4096;
  config.intermediate_size = 14336;
  config.num_hidden_layers = 32;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 128;
  const int64_t all = 8030261248;
  EXPECT_EQ(MatmulWeights(config), all - 128256 * 4096 - 65 * 4096);
  const double weights = static_cast<double>(MatmulWeights(config));
  EXPECT_DOUBLE_EQ(FlopsPerToken(config, 8192, /*frozen_base=*/false),
                   6 * weights + 12.0 * 32 * 32 * 128 * 8192);
  EXPECT_DOUBLE_EQ(FlopsPerToken(config, 8192, /*frozen_base=*/true),
                   4 * weights + 12.0 * 32 * 32 * 128 * 8192);
}

}  // namespace
}  // namespace llama
