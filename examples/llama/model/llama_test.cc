#include "examples/llama/model/llama.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace llama {
namespace {

LlamaConfig Small(const std::string& type, const std::string& more = "") {
  const absl::StatusOr<LlamaConfig> config = ParseLlamaConfig(absl::StrCat(
      R"({"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
          "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 1, "head_dim": 6, "model_type": ")",
      type, "\"", more, "}"));
  return config.ok() ? *config : LlamaConfig{};
}

TEST(LlamaTest, InitialParametersDependOnTheSeedAlone) {
  CausalLm a(Small("qwen2", R"(, "pad_token_id": 3)"));
  CausalLm b(Small("qwen2", R"(, "pad_token_id": 3)"));
  InitializeParameters(*a, 7, 0.02);
  at::manual_seed(1);
  InitializeParameters(*b, 7, 0.02);
  for (const auto& item : a->named_parameters()) {
    EXPECT_TRUE(item.value().equal(b->named_parameters()[item.key()]))
        << item.key();
  }
  InitializeParameters(*b, 8, 0.02);
  EXPECT_FALSE(a->parameters()[0].equal(b->parameters()[0]));
}

TEST(LlamaTest, InitialParametersAreNormalOrZeroOrOne) {
  LlamaConfig config = Small("qwen2", R"(, "pad_token_id": 3)");
  config.vocab_size = 1000;
  CausalLm model(config);
  InitializeParameters(*model, 7, 0.25);
  const auto parameters = model->named_parameters();
  for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"}) {
    EXPECT_NEAR(parameters[name].mean().item<double>(), 0, 0.01) << name;
    EXPECT_NEAR(parameters[name].std().item<double>(), 0.25, 0.01) << name;
  }
  const at::Tensor& embedding = parameters["model.embed_tokens.weight"];
  EXPECT_EQ(embedding[3].abs().max().item<double>(), 0);
  EXPECT_GT(embedding[2].abs().max().item<double>(), 0);
  EXPECT_EQ(parameters["model.layers.0.self_attn.q_proj.bias"]
                .abs()
                .max()
                .item<double>(),
            0);
  EXPECT_TRUE(parameters["model.norm.weight"].eq(1).all().item<bool>());
}

TEST(LlamaTest, EachPositionHasItsTablesAsTheLastOne) {
  LlamaConfig config = Small("llama");
  for (const bool is_dynamic : {false, true}) {
    if (is_dynamic) {
      config.rope.scaling = RopeScaling{RopeScaling::Type::kDynamic, 3};
      config.rope.scaling->tokens = 4;
    }
    const RotaryTables last =
        TablesOfLastTokens(config.rope, config.head_dim, 8, at::kFloat);
    for (int64_t i = 0; i < 8; ++i) {
      const RotaryTables tables = MakeRotaryTables(
          config.rope, config.head_dim, at::arange(i + 1), at::kFloat);
      EXPECT_TRUE(last.cos[i].allclose(tables.cos[i], 1e-6)) << i;
      EXPECT_TRUE(last.sin[i].allclose(tables.sin[i], 1e-6)) << i;
    }
  }
}

}  // namespace
}  // namespace llama
