#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "adapters/lora.h"
#include "base/testing/status_matchers.h"

namespace fsdp::adapters {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file with `members` beside what all have.
std::string FileWith(absl::string_view members) {
  return absl::StrCat(R"({"peft_type": "LORA", "r": 4, "lora_alpha": 6, )",
                      R"("target_modules": ["q_proj"], )", members,
                      R"("bias": "none"})");
}

TEST(LoraConfigTest, ReadsWhatPeftWritesAndWhatItWritesItself) {
  auto config = ParseLoraConfig(R"({
    "alpha_pattern": {}, "auto_mapping": null, "bias": "none",
    "base_model_name_or_path": "some/model", "eva_config": null,
    "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true,
    "init_lora_weights": true, "layer_replication": null,
    "layers_pattern": null, "layers_to_transform": null, "loftq_config": {},
    "lora_alpha": 12.5, "lora_bias": false, "lora_dropout": 0.25,
    "megatron_config": null, "megatron_core": "megatron.core",
    "modules_to_save": ["lm_head"], "peft_type": "LORA",
    "peft_version": "0.21.2", "qalora_group_size": 16, "r": 5,
    "rank_pattern": {}, "revision": null,
    "target_modules": ["v_proj", "q_proj"], "task_type": "CAUSAL_LM",
    "use_dora": false, "use_rslora": true})");
  std::vector<std::string> targets = {"v_proj", "q_proj"};
  for (int i = 0; i < 2; ++i) {
    ASSERT_OK(config);
    EXPECT_EQ(config->rank, 5);
    EXPECT_EQ(config->alpha, 12.5);
    EXPECT_EQ(config->dropout, 0.25);
    EXPECT_TRUE(config->rank_stabilized);
    EXPECT_EQ(config->targets, targets);
    EXPECT_THAT(config->trained_whole, ElementsAre("lm_head"));
    EXPECT_EQ(config->base_model, "some/model");
    EXPECT_EQ(config->task_type, "CAUSAL_LM");
    EXPECT_DOUBLE_EQ(config->Scale(), 12.5 / std::sqrt(5.0));
    config = ParseLoraConfig(ToJson(*config));
    std::sort(targets.begin(), targets.end());  // as they are written
  }
}

TEST(LoraConfigTest, AllLinearIsAText) {
  LoraConfig config;
  config.targets = {kAllLinear};
  EXPECT_THAT(ToJson(config), HasSubstr(R"("target_modules": "all-linear")"));
  const auto again = ParseLoraConfig(ToJson(config));
  ASSERT_OK(again);
  EXPECT_THAT(again->targets, ElementsAre(kAllLinear));
  EXPECT_THAT(again->trained_whole, ::testing::IsEmpty());
  EXPECT_EQ(again->base_model, "");
  EXPECT_EQ(again->task_type, "");
  EXPECT_FALSE(again->rank_stabilized);
}

TEST(LoraConfigTest, WhatWouldComputeSomethingElseIsRefusedByName) {
  for (const char* const member :
       {R"("use_dora": true)", R"("rank_pattern": {"q_proj": 0})",
        R"("alpha_pattern": {"q_proj": "8"})", R"("lora_bias": true)",
        R"("fan_in_fan_out": true)", R"("layers_to_transform": ["1"])",
        R"("layers_pattern": "h")", R"("init_lora_weights": "pissa")",
        R"("use_qalora": true)", R"("something_new": 3)",
        R"("corda_config": {"rank": 3})"}) {
    const std::string name(absl::string_view(member).substr(
        1, absl::string_view(member).find('"', 1) - 1));
    EXPECT_THAT(ParseLoraConfig(FileWith(absl::StrCat(member, ", "))),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(name)))
        << member;
  }
  EXPECT_OK(ParseLoraConfig(FileWith("")));
  const auto with = [](absl::string_view from, absl::string_view to) {
    return absl::StrReplaceAll(FileWith(""), {{from, to}});
  };
  for (const auto& [from, to, said] :
       {std::make_tuple("LORA", "IA3", "peft_type"),
        std::make_tuple(R"("none")", R"("all")", "bias"),
        std::make_tuple(R"(["q_proj"])", R"("(q_proj")", "list the names"),
        std::make_tuple(R"(["q_proj"])",
                        R"("all-linear", "layers_to_transform": [1])",
                        "layers_to_transform"),
        std::make_tuple(R"(["q_proj"])", R"([3])", "target_modules"),
        std::make_tuple(R"("r": 4)", R"("r": 4.5)", "r is not"),
        std::make_tuple(R"("r": 4)", R"("r": 0)", "rank 0"),
        std::make_tuple(R"("lora_alpha": 6)", R"("lora_alpha": "6")",
                        "lora_alpha"),
        std::make_tuple(R"("lora_alpha": 6)", R"("lora_dropout": 1)",
                        "dropout 1"),
        std::make_tuple(R"("peft_type")", R"("petf_type")", "peft_type")}) {
    EXPECT_THAT(ParseLoraConfig(with(from, to)),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(said)))
        << to;
  }
  EXPECT_THAT(ParseLoraConfig("[]"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("PEFT")));
}

// The linear layers of a Llama of 12 layers that PEFT 0.21.2 gives adapters,
// their ranks and scales.
TEST(LoraConfigTest, PatternsTakeTheLayersThatPeftTakes) {
  struct Case {
    std::string json;
    std::vector<std::string> layers;
  };
  const Case cases[] = {
      {R"json({"peft_type": "LORA", "target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8, "layers_to_transform": [1, 11], "rank_pattern": {"model.layers.1.self_attn.q_proj": 2, "down_proj": 3}, "alpha_pattern": {"layers\\.1\\..*_proj": 5, "q_proj": 7}})json",
       {"model.layers.1.self_attn.q_proj 2 2.5",
        "model.layers.1.mlp.down_proj 3 1.66667",
        "model.layers.11.self_attn.q_proj 4 1.75",
        "model.layers.11.mlp.down_proj 3 2.66667"}},
      {R"json({"peft_type": "LORA", "target_modules": ".*\\.layers\\.(0|1[01])\\.(self_attn\\.[kv]_proj|mlp\\.(?!up).*_proj)", "r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 1, ".*": 2}, "alpha_pattern": {"k_proj": 3}})json",
       {"model.layers.0.self_attn.k_proj 2 1.5",
        "model.layers.0.self_attn.v_proj 1 8",
        "model.layers.0.mlp.gate_proj 2 4", "model.layers.0.mlp.down_proj 2 4",
        "model.layers.10.self_attn.k_proj 2 1.5",
        "model.layers.10.self_attn.v_proj 1 8",
        "model.layers.10.mlp.gate_proj 2 4",
        "model.layers.10.mlp.down_proj 2 4",
        "model.layers.11.self_attn.k_proj 2 1.5",
        "model.layers.11.self_attn.v_proj 1 8",
        "model.layers.11.mlp.gate_proj 2 4",
        "model.layers.11.mlp.down_proj 2 4"}},
      {R"json({"peft_type": "LORA", "target_modules": ["v_proj", "model.layers.2.self_attn.o_proj"], "r": 4, "lora_alpha": 8, "layers_to_transform": 3, "use_rslora": true})json",
       {"model.layers.2.self_attn.o_proj 4 4",
        "model.layers.3.self_attn.v_proj 4 4"}},
      {R"json({"peft_type": "LORA", "target_modules": ["v_proj"], "r": 4, "lora_alpha": 8, "layers_to_transform": [0, 7], "rank_pattern": {"7.self_attn.v_proj": 6}})json",
       {"model.layers.0.self_attn.v_proj 4 2",
        "model.layers.7.self_attn.v_proj 6 1.33333"}},
  };
  std::vector<std::string> names;
  for (int i = 0; i < 12; ++i) {
    for (const char* const name :
         {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
          "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
          "mlp.down_proj"}) {
      names.push_back(absl::StrCat("model.layers.", i, ".", name));
    }
  }
  names.emplace_back("lm_head");
  for (const Case& one : cases) {
    auto config = ParseLoraConfig(one.json);
    for (int i = 0; i < 2; ++i) {
      ASSERT_OK(config) << one.json;
      std::vector<std::string> layers;
      for (const std::string& name : names) {
        if (!config->IsTarget(name)) continue;
        const LoraConfig own = config->Of(name);
        layers.push_back(absl::StrCat(name, " ", own.rank, " ", own.Scale()));
      }
      EXPECT_EQ(layers, one.layers) << one.json;
      config = ParseLoraConfig(ToJson(*config));
    }
  }
}

// An expression that would take ages by trying.
TEST(LoraConfigTest, AnExpressionTakesNoLongTime) {
  LoraConfig config;
  config.target_pattern = "((a*)*)*b";
  ASSERT_OK(Check(config));
  EXPECT_FALSE(config.IsTarget(std::string(200, 'a')));
}

TEST(LoraConfigTest, ChecksWhatAUserMakes) {
  LoraConfig config;
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("no layers")));
  config.targets = {"q"};
  EXPECT_OK(Check(config));
  config.dropout = -0.1;
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("dropout -0.1")));
  config.dropout = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("dropout nan")));
  config.dropout = 0;
  config.target_pattern = "q";
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("either a list or an")));
  config.targets = {};
  EXPECT_OK(Check(config));
  config.layers = {1};
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("needs a list")));
  config.target_pattern = "";
  config.targets = {"up_proj"};
  EXPECT_TRUE(config.IsTarget("model.layers.0.mlp.experts.1.up_proj"));
  EXPECT_FALSE(config.IsTarget("model.layers.1.mlp.experts.0.up_proj"));
  config.alpha = std::numeric_limits<double>::infinity();
  EXPECT_THAT(Check(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                      HasSubstr("alpha inf")));
}

TEST(LoraConfigTest, NamesAreWholeOnesOrTheirEnds) {
  const auto is_target = [](absl::string_view name,
                            std::vector<std::string> targets) {
    LoraConfig config;
    config.targets = std::move(targets);
    return config.IsTarget(name);
  };
  EXPECT_TRUE(is_target("model.layers.0.q_proj", {"x", "q_proj"}));
  EXPECT_TRUE(is_target("model.layers.0.q_proj", {"0.q_proj"}));
  EXPECT_TRUE(is_target("q_proj", {"q_proj"}));
  EXPECT_FALSE(is_target("model.layers.0.eq_proj", {"q_proj"}));
  EXPECT_FALSE(is_target("model.layers.10.q_proj", {"0.q_proj"}));
  EXPECT_FALSE(is_target("q_proj.x", {"q_proj"}));
  EXPECT_FALSE(is_target("q_proj", {}));
}

}  // namespace
}  // namespace fsdp::adapters
