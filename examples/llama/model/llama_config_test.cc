#include "examples/llama/model/llama_config.h"

#include <cstddef>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"

namespace llama {
namespace {

using ::fsdp::Json;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Returns a small configuration of that type in which `name` is `value`, JSON;
// an empty value takes it away.
std::string With(const std::string& type, const std::string& name = "",
                 const std::string& value = "") {
  Json::Object object = {{"model_type", type},      {"vocab_size", 100},
                         {"hidden_size", 64},       {"intermediate_size", 96},
                         {"num_hidden_layers", 3},  {"num_attention_heads", 8},
                         {"num_key_value_heads", 4}};
  Json::Object changed;
  for (auto& member : object) {
    if (member.first != name) changed.push_back(std::move(member));
  }
  if (!value.empty()) changed.emplace_back(name, *Json::Parse(value));
  return Json(changed).ToString();
}

auto Refuses(absl::StatusCode code, const std::string& part) {
  return StatusIs(code, HasSubstr(part));
}

TEST(LlamaConfigTest, ReadsSizesAndHasTheDefaultsOfTransformers) {
  ASSERT_OK_AND_ASSIGN(const LlamaConfig config,
                       ParseLlamaConfig(With("llama")));
  EXPECT_EQ(config.vocab_size, 100);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 96);
  EXPECT_EQ(config.num_hidden_layers, 3);
  EXPECT_EQ(config.num_attention_heads, 8);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.max_position_embeddings, 2048);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_EQ(config.rope.theta, 10000);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_EQ(config.pad_token_id, std::nullopt);
  EXPECT_THAT(config.eos_token_ids, ::testing::IsEmpty());
}

TEST(LlamaConfigTest, ReadsWhatIsThere) {
  ASSERT_OK_AND_ASSIGN(const LlamaConfig config, ParseLlamaConfig(R"({
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
    "initializer_range": 0.5, "hidden_act": "silu", "attention_dropout": 0.0,
    "attention_bias": false, "mlp_bias": false, "pretraining_tp": 1,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008],
    "pad_token_id": 128004, "rope_theta": 500000.0, "rope_scaling": {
      "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"}})"));
  EXPECT_EQ(config.max_position_embeddings, 131072);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.initializer_range, 0.5);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.pad_token_id, 128004);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(128001, 128008));
  EXPECT_EQ(config.rope.theta, 500000);
  ASSERT_TRUE(config.rope.scaling.has_value());
  EXPECT_EQ(config.rope.scaling->factor, 32);
}

// Returns qkv_bias, output_bias, mlp_bias, qk_norm.
std::vector<bool> Differences(const std::string& text) {
  const absl::StatusOr<LlamaConfig> config = ParseLlamaConfig(text);
  if (!config.ok()) return {};
  return {config->qkv_bias, config->output_bias, config->mlp_bias,
          config->qk_norm};
}

TEST(LlamaConfigTest, ArchitecturesDifferInBiasesAndNorms) {
  EXPECT_THAT(Differences(With("llama")), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Differences(With("llama", "attention_bias", "true")),
              ElementsAre(1, 1, 0, 0));
  EXPECT_THAT(Differences(With("llama", "mlp_bias", "true")),
              ElementsAre(0, 0, 1, 0));
  EXPECT_THAT(Differences(With("qwen2")), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(Differences(With("qwen3")), ElementsAre(0, 0, 0, 1));
  EXPECT_THAT(Differences(With("qwen3", "attention_bias", "true")),
              ElementsAre(1, 1, 0, 1));
  EXPECT_THAT(ParseLlamaConfig(With("qwen2", "attention_bias", "false")),
              Refuses(absl::StatusCode::kUnimplemented, "attention_bias"));
  for (const char* type : {"qwen2", "qwen3"}) {
    EXPECT_THAT(ParseLlamaConfig(With(type, "mlp_bias", "true")),
                Refuses(absl::StatusCode::kUnimplemented, "mlp_bias"));
  }
}

TEST(LlamaConfigTest, SizesOfHeadsDefaultAsInTransformers) {
  const auto heads = [](const std::string& text) {
    const absl::StatusOr<LlamaConfig> config = ParseLlamaConfig(text);
    return config.ok()
               ? std::pair(config->num_key_value_heads, config->head_dim)
               : std::pair<int64_t, int64_t>();
  };
  using Pair = std::pair<int64_t, int64_t>;
  EXPECT_EQ(heads(With("llama", "num_key_value_heads")), Pair(8, 8));
  EXPECT_EQ(heads(With("qwen2", "num_key_value_heads", "null")), Pair(8, 8));
  EXPECT_EQ(heads(With("llama", "head_dim", "32")), Pair(4, 32));
  EXPECT_EQ(heads(With("qwen2")), Pair(4, 8));
  EXPECT_EQ(heads(With("qwen3")), Pair(4, 128));
  // The default is 32, of which 8 is no multiple.
  EXPECT_THAT(ParseLlamaConfig(With("qwen2", "num_key_value_heads")),
              Refuses(absl::StatusCode::kInvalidArgument, "which is 32"));
  // A size that does not divide is only wrong where it is divided.
  EXPECT_THAT(ParseLlamaConfig(With("llama", "hidden_size", "68")),
              Refuses(absl::StatusCode::kInvalidArgument,
                      "hidden_size is 68: without head_dim"));
  EXPECT_EQ(heads(With("qwen3", "hidden_size", "68")), Pair(4, 128));
  EXPECT_THAT(ParseLlamaConfig(With("llama", "head_dim", "7")),
              Refuses(absl::StatusCode::kInvalidArgument, "7 elements"));
  EXPECT_THAT(ParseLlamaConfig(With("llama", "hidden_size", "4")),
              Refuses(absl::StatusCode::kInvalidArgument, "hidden_size"));
}

TEST(LlamaConfigTest, RefusesSizesThatCannotBe) {
  for (const char* name :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings"}) {
    for (const char* value : {"0", "-8", "8.0", "\"8\"", "2147483648"}) {
      EXPECT_THAT(ParseLlamaConfig(With("llama", name, value)),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr(name), HasSubstr(value))));
    }
  }
  for (const char* name : {"vocab_size", "hidden_size", "intermediate_size",
                           "num_hidden_layers", "num_attention_heads"}) {
    EXPECT_THAT(ParseLlamaConfig(With("llama", name)),
                Refuses(absl::StatusCode::kInvalidArgument,
                        absl::StrCat(name, " is missing")));
  }
  for (const char* name : {"rms_norm_eps", "initializer_range"}) {
    EXPECT_THAT(ParseLlamaConfig(With("llama", name, "0")),
                Refuses(absl::StatusCode::kInvalidArgument, name));
  }
  EXPECT_THAT(ParseLlamaConfig(With("llama", "num_key_value_heads", "3")),
              Refuses(absl::StatusCode::kInvalidArgument,
                      "num_attention_heads is 8: it has to be a multiple"));
}

TEST(LlamaConfigTest, RefusesWhatWouldBeComputedOtherwise) {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"model_type", R"("qwen3_moe")"},
      {"model_type", R"("mistral")"},
      {"attention_dropout", "0.1"},
      {"attention_dropout", R"("0")"},
      {"hidden_dropout", "0.1"},
      {"hidden_dropout_prob", "0.1"},
      {"residual_dropout", "0.1"},
      {"resid_pdrop", "0.1"},
      {"embd_pdrop", "0.1"},
      {"num_experts", "8"},
      {"num_local_experts", "8"},
      {"n_routed_experts", "8"},
      {"partial_rotary_factor", "0.5"},
      {"quantization_config", "{}"},
      {"is_causal", "false"},
      {"hidden_act", R"("gelu")"},
      {"sliding_window", "4096"},
      {"layer_types", R"(["full_attention", "sliding_attention"])"},
      {"rope_scaling", R"({"type": "longrope"})"},
      {"dtype", R"("float8_e4m3fn")"},
      {"torch_dtype", R"("float8_e4m3fn")"}};
  for (const auto& [name, value] : changes) {
    EXPECT_THAT(ParseLlamaConfig(With("llama", name, value)),
                StatusIs(absl::StatusCode::kUnimplemented,
                         AllOf(HasSubstr(name), HasSubstr("support"))))
        << value;
  }
}

TEST(LlamaConfigTest, TakesTheSameWhereItChangesNothing) {
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"attention_dropout", "0"},
      {"attention_dropout", "null"},
      {"num_experts", "0"},
      {"partial_rotary_factor", "1.0"},
      {"quantization_config", "null"},
      {"is_causal", "true"},
      {"hidden_act", R"("silu")"},
      {"sliding_window", "null"},
      {"use_sliding_window", "false"},
      {"anything_else", "[1]"},
      {"dtype", R"("float32")"},
      {"torch_dtype", R"("float16")"},
      {"torch_dtype", R"("float64")"},
      {"layer_types", R"(["full_attention", "full_attention"])"}};
  for (const auto& [name, value] : changes) {
    EXPECT_OK(ParseLlamaConfig(With("llama", name, value))) << name << value;
  }
}

TEST(LlamaConfigTest, AWindowCountsWhereALayerHasIt) {
  const auto parse = [](const std::string& window) {
    const std::string text = With("qwen2");
    return ParseLlamaConfig(
        absl::StrCat(text.substr(0, text.size() - 1), ", ", window, "}"));
  };
  const auto is_refused =
      Refuses(absl::StatusCode::kUnimplemented, "use_sliding_window is true");
  EXPECT_OK(parse(R"("sliding_window": 32)"));
  EXPECT_OK(parse(R"("sliding_window": 32, "use_sliding_window": false)"));
  EXPECT_OK(parse(R"("sliding_window": null, "use_sliding_window": true,
                     "max_window_layers": 0)"));
  // The model has three layers.
  EXPECT_OK(parse(R"("sliding_window": 32, "use_sliding_window": true,
                     "max_window_layers": 3)"));
  EXPECT_OK(parse(R"("sliding_window": 32, "use_sliding_window": true)"));
  EXPECT_THAT(parse(R"("sliding_window": 32, "use_sliding_window": true,
                       "max_window_layers": 2)"),
              is_refused);
  EXPECT_THAT(parse(R"("use_sliding_window": true, "max_window_layers": 2)"),
              is_refused);
  EXPECT_THAT(parse(R"("layer_types": "full_attention")"),
              Refuses(absl::StatusCode::kInvalidArgument, "layer_types"));
}

TEST(LlamaConfigTest, TokensAreBelowTheVocabulary) {
  for (const char* name : {"eos_token_id", "pad_token_id"}) {
    EXPECT_OK(ParseLlamaConfig(With("llama", name, "99")));
    EXPECT_OK(ParseLlamaConfig(With("llama", name, "0")));
    for (const char* value : {"100", "-2", "1.5"}) {
      EXPECT_THAT(ParseLlamaConfig(With("llama", name, value)),
                  Refuses(absl::StatusCode::kInvalidArgument,
                          absl::StrCat(name, " is ", value)));
    }
  }
  ASSERT_OK_AND_ASSIGN(const LlamaConfig one,
                       ParseLlamaConfig(With("llama", "eos_token_id", "7")));
  EXPECT_THAT(one.eos_token_ids, ElementsAre(7));
  EXPECT_THAT(ParseLlamaConfig(With("llama", "eos_token_id", "[7, 100]")),
              Refuses(absl::StatusCode::kInvalidArgument, "[7, 100]"));
  // The first Llama has -1.
  ASSERT_OK_AND_ASSIGN(const LlamaConfig last,
                       ParseLlamaConfig(With("llama", "pad_token_id", "-1")));
  EXPECT_EQ(last.pad_token_id, 99);
}

TEST(LlamaConfigTest, RefusesWhatIsNoConfiguration) {
  EXPECT_THAT(ParseLlamaConfig(""),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("")));
  EXPECT_THAT(ParseLlamaConfig("[]"),
              Refuses(absl::StatusCode::kInvalidArgument, "object"));
  EXPECT_THAT(ParseLlamaConfig("{}"),
              Refuses(absl::StatusCode::kInvalidArgument,
                      "model_type is missing: it has to be a string"));
  EXPECT_THAT(ParseLlamaConfig(With("llama", "tie_word_embeddings", "1")),
              Refuses(absl::StatusCode::kInvalidArgument,
                      "tie_word_embeddings is 1: it has to be true or false"));
  // A message does not get as long as a file.
  const absl::StatusOr<LlamaConfig> refused = ParseLlamaConfig(With(
      "llama", "vocab_size", absl::StrCat("\"", std::string(9999, 'x'), "\"")));
  EXPECT_LT(refused.status().message().size(), 200u);
}

absl::StatusOr<RopeConfig> Parse(const std::string& text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  return ParseRopeConfig(json, /*max_position_embeddings=*/4096);
}

std::string Llama3(const std::string& more = "") {
  return absl::StrCat(
      R"("rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, )",
      R"("high_freq_factor": 4.0)", more);
}

TEST(RopeConfigTest, ThetaIsReadWhereEitherVersionHasIt) {
  const std::pair<const char*, double> cases[] = {
      {"{}", 10000},
      {R"({"rope_scaling": null})", 10000},
      {R"({"rope_parameters": {}})", 10000},
      {R"({"rope_scaling": {"type": "default"}})", 10000},
      {R"({"rope_theta": 500000})", 500000},
      {R"({"rope_parameters": {"rope_theta": 500000.0}})", 500000},
      {R"({"rope_theta": 500000, "rope_parameters":
           {"rope_type": "default", "rope_theta": 500000.0}})",
       500000}};
  for (const auto& [text, theta] : cases) {
    ASSERT_OK_AND_ASSIGN(const RopeConfig rope, Parse(text));
    EXPECT_EQ(rope.theta, theta) << text;
    EXPECT_FALSE(rope.scaling.has_value()) << text;
  }
}

TEST(RopeConfigTest, ReadsLlama3OfBothVersions) {
  const std::string inner =
      Llama3(R"(, "original_max_position_embeddings": 8192)");
  for (const std::string& text :
       {absl::StrCat(R"({"rope_theta": 3.0, "rope_scaling": {)", inner, "}}"),
        absl::StrCat(R"({"rope_parameters": {"rope_theta": 3.0, )", inner,
                     "}}"),
        absl::StrCat(R"({"rope_theta": 3.0, "rope_scaling": {)", inner,
                     R"(}, "rope_parameters": {)", inner, "}}")}) {
    ASSERT_OK_AND_ASSIGN(const RopeConfig rope, Parse(text));
    EXPECT_EQ(rope.theta, 3) << text;
    ASSERT_TRUE(rope.scaling.has_value()) << text;
    EXPECT_EQ(rope.scaling->factor, 8);
    EXPECT_EQ(rope.scaling->low, 1);
    EXPECT_EQ(rope.scaling->high, 4);
    EXPECT_EQ(rope.scaling->tokens, 8192);
  }
}

TEST(RopeConfigTest, TheOriginalLengthMayBeOutsideOrAbsent) {
  ASSERT_OK_AND_ASSIGN(
      const RopeConfig outside,
      Parse(absl::StrCat(R"({"original_max_position_embeddings": 512, )",
                         R"("rope_scaling": {)", Llama3(), "}}")));
  EXPECT_EQ(outside.scaling->tokens, 512);
  ASSERT_OK_AND_ASSIGN(
      const RopeConfig absent,
      Parse(absl::StrCat(R"({"rope_scaling": {)", Llama3(), "}}")));
  EXPECT_EQ(absent.scaling->tokens, 4096);
}

TEST(RopeConfigTest, RefusesOtherTypesAndParameters) {
  const std::pair<std::string, std::string> cases[] = {
      {R"("rope_scaling": {"type": "longrope"})",
       "rope_scaling.type is \"longrope\": default, linear, dynamic, yarn and "
       "llama3"},
      // The old name does not hide the new one.
      {R"("rope_parameters": {"rope_type": "mrope", "type": "default"})",
       "rope_parameters.rope_type"},
      {R"("rope_scaling": {"partial_rotary_factor": 0.5})",
       "rope_scaling.partial_rotary_factor is 0.5: only 1"},
      {R"("rope_scaling": {"factor": 2.0})", "rope_scaling.factor is 2.0"},
      {R"("rope_scaling": {"type": "dynamic", "factor": 2, "mscale": 1})",
       "mscale"},
      {R"("rope_scaling": {)" + Llama3(R"(, "attention_factor": 1)") + "}",
       "attention_factor"},
      {R"("rope_parameters": {"full_attention": {}})", "full_attention"}};
  for (const auto& [text, part] : cases) {
    EXPECT_THAT(Parse(absl::StrCat("{", text, "}")),
                Refuses(absl::StatusCode::kUnimplemented, part));
  }
  EXPECT_OK(Parse(R"({"rope_scaling": {"partial_rotary_factor": 1.0}})"));
}

TEST(RopeConfigTest, RefusesWhatIsMissingOrContradictsItself) {
  const std::string original = R"("original_max_position_embeddings": )";
  const std::pair<std::string, std::string> cases[] = {
      {R"("rope_scaling": 3)", "rope_scaling is 3: it has to be an object"},
      {R"("rope_scaling": {"type": "linear"})",
       "rope_scaling.factor is missing"},
      {R"("rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1})",
       "above beta_slow, which is 1"},
      {R"("rope_theta": 2.0, "rope_parameters": {"rope_theta": 3.0})",
       "rope_parameters.rope_theta is 3.0: outside it is 2"},
      {R"("rope_parameters": {"rope_theta": 3.0}, "rope_scaling": {)" +
           Llama3() + "}",
       "contradicts rope_scaling"},
      {original + R"(512, "rope_scaling": {)" + Llama3(", " + original + "8") +
           "}",
       "original_max_position_embeddings is 8: outside it is 512"}};
  for (const auto& [text, part] : cases) {
    EXPECT_THAT(Parse(absl::StrCat("{", text, "}")),
                Refuses(absl::StatusCode::kInvalidArgument, part));
  }
}

TEST(RopeConfigTest, RefusesNumbersThatCannotBe) {
  const auto of = [](const std::string& name, const std::string& value) {
    std::string inner =
        Llama3(R"(, "rope_theta": 3.0, "original_max_position_embeddings": 8)");
    const size_t begin = inner.find(absl::StrCat("\"", name, "\": "));
    const size_t end = inner.find(',', begin);
    inner.replace(begin, end - begin, absl::StrCat("\"", name, "\": ", value));
    return Parse(absl::StrCat(R"({"rope_scaling": {)", inner, "}}"));
  };
  ASSERT_OK(of("factor", "2"));
  for (const char* name :
       {"rope_theta", "factor", "low_freq_factor", "high_freq_factor",
        "original_max_position_embeddings"}) {
    for (const char* value : {"0", "-1", "\"8\""}) {
      EXPECT_THAT(of(name, value),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr(name), HasSubstr(value))));
    }
  }
  EXPECT_THAT(of("high_freq_factor", "1.0"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("above low_freq_factor, which is 1")));
}

}  // namespace
}  // namespace llama
