#include "examples/llama/model/llama_config.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "examples/llama/model/rope_config.h"

namespace llama {
namespace {

using fsdp::Json;

enum class Architecture { kLlama, kQwen2, kQwen3 };

absl::StatusOr<Architecture> ParseArchitecture(const ConfigFields& fields) {
  FSDP_ASSIGN_OR_RETURN(const std::string type, fields.Text("model_type"));
  if (type == "llama") return Architecture::kLlama;
  if (type == "qwen2") return Architecture::kQwen2;
  if (type == "qwen3") return Architecture::kQwen3;
  return fields.Unsupported("model_type",
                            "llama, qwen2 and qwen3 are supported");
}

// Layers from max_window_layers on have windows if use_sliding_window says so.
// Defaults are those of transformers, whose Llama has no windows at all.
absl::Status CheckWindows(const ConfigFields& fields, Architecture architecture,
                          int64_t layers) {
  constexpr absl::string_view kSupported =
      "attention is only supported over all tokens, without a sliding window";
  const bool is_llama = architecture == Architecture::kLlama;
  FSDP_ASSIGN_OR_RETURN(const bool use,
                        fields.Bool("use_sliding_window", is_llama));
  // A null means no window; without the member, Qwen has a default window.
  const bool has_window = fields.Find("sliding_window") != nullptr ||
                          (!is_llama && !fields.Has("sliding_window"));
  FSDP_ASSIGN_OR_RETURN(
      const int64_t first,
      fields.Integer("max_window_layers", is_llama ? 0 : 28, /*least=*/0));
  if (use && has_window && first < layers) {
    return fields.Unsupported(
        is_llama ? "sliding_window" : "use_sliding_window", kSupported);
  }
  const Json* types = fields.Find("layer_types");
  if (types == nullptr) return absl::OkStatus();
  if (types->As<Json::Array>() == nullptr) {
    return fields.Invalid("layer_types", "it has to be a list");
  }
  for (const Json& type : *types->As<Json::Array>()) {
    if (!(type == Json("full_attention"))) {
      return fields.Unsupported("layer_types", kSupported);
    }
  }
  return absl::OkStatus();
}

// These numbers change what is computed; only one value of each is supported.
struct OnlyValue {
  absl::string_view name;
  double value;
  absl::string_view supported;
};
constexpr absl::string_view kNoDropout =
    "there is no dropout: only 0 is supported";
constexpr absl::string_view kDense = "only dense models are supported";
constexpr OnlyValue kOnlyValues[] = {
    {"attention_dropout", 0, kNoDropout},
    {"hidden_dropout", 0, kNoDropout},
    {"hidden_dropout_prob", 0, kNoDropout},
    {"residual_dropout", 0, kNoDropout},
    {"resid_pdrop", 0, kNoDropout},
    {"embd_pdrop", 0, kNoDropout},
    {"num_experts", 0, kDense},
    {"num_local_experts", 0, kDense},
    {"n_routed_experts", 0, kDense},
    {"partial_rotary_factor", 1, "only 1 is supported"},
};

// Refuses what would be computed in another way than here.
absl::Status CheckSupported(const ConfigFields& fields) {
  for (const OnlyValue& only : kOnlyValues) {
    const Json* value = fields.Find(only.name);
    if (value != nullptr && value->NumberOr(only.value + 1) != only.value) {
      return fields.Unsupported(only.name, only.supported);
    }
  }
  if (fields.Find("quantization_config") != nullptr) {
    return fields.Unsupported("quantization_config",
                              "only weights as they are are supported");
  }
  FSDP_ASSIGN_OR_RETURN(const bool is_causal, fields.Bool("is_causal", true));
  if (!is_causal) {
    return fields.Unsupported("is_causal", "only true is supported");
  }
  FSDP_ASSIGN_OR_RETURN(const std::string act,
                        fields.Text("hidden_act", "silu"));
  if (act != "silu") {
    return fields.Unsupported("hidden_act", "only silu is supported");
  }
  return absl::OkStatus();
}

absl::Status ParseSizes(const ConfigFields& fields, Architecture architecture,
                        LlamaConfig& config) {
  FSDP_ASSIGN_OR_RETURN(config.vocab_size, fields.Integer("vocab_size"));
  FSDP_ASSIGN_OR_RETURN(config.hidden_size, fields.Integer("hidden_size"));
  FSDP_ASSIGN_OR_RETURN(config.intermediate_size,
                        fields.Integer("intermediate_size"));
  FSDP_ASSIGN_OR_RETURN(config.num_hidden_layers,
                        fields.Integer("num_hidden_layers"));
  const bool is_llama = architecture == Architecture::kLlama;
  FSDP_ASSIGN_OR_RETURN(
      config.max_position_embeddings,
      fields.Integer("max_position_embeddings", is_llama ? 2048 : 32768));
  return absl::OkStatus();
}

// Needs the sizes. Defaults are those of transformers.
absl::Status ParseHeads(const ConfigFields& fields, Architecture architecture,
                        LlamaConfig& config) {
  FSDP_ASSIGN_OR_RETURN(config.num_attention_heads,
                        fields.Integer("num_attention_heads"));
  // A null means as many as there are query heads, also for Qwen.
  const bool as_queries =
      architecture == Architecture::kLlama || fields.Has("num_key_value_heads");
  FSDP_ASSIGN_OR_RETURN(
      config.num_key_value_heads,
      fields.Integer("num_key_value_heads",
                     as_queries ? config.num_attention_heads : 32));
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    return fields.Invalid(
        "num_attention_heads",
        absl::StrCat(
            "it has to be a multiple of num_key_value_heads, which is ",
            config.num_key_value_heads));
  }
  const bool is_qwen3 = architecture == Architecture::kQwen3;
  if (!is_qwen3 && fields.Find("head_dim") == nullptr &&
      config.hidden_size % config.num_attention_heads != 0) {
    return fields.Invalid("hidden_size",
                          absl::StrCat("without head_dim it has to be a "
                                       "multiple of num_attention_heads, "
                                       "which is ",
                                       config.num_attention_heads));
  }
  const int64_t divided = config.hidden_size / config.num_attention_heads;
  FSDP_ASSIGN_OR_RETURN(config.head_dim,
                        fields.Integer("head_dim", is_qwen3 ? 128 : divided));
  if (config.head_dim % 2 != 0) {
    return fields.Invalid("head_dim",
                          absl::StrCat("heads have ", config.head_dim,
                                       " elements, which has to be even"));
  }
  return absl::OkStatus();
}

absl::Status ParseBiases(const ConfigFields& fields, Architecture architecture,
                         LlamaConfig& config) {
  FSDP_ASSIGN_OR_RETURN(config.mlp_bias, fields.Bool("mlp_bias", false));
  if (config.mlp_bias && architecture != Architecture::kLlama) {
    return fields.Unsupported("mlp_bias", "no Qwen has one");
  }
  const bool is_qwen2 = architecture == Architecture::kQwen2;
  FSDP_ASSIGN_OR_RETURN(const bool attention_bias,
                        fields.Bool("attention_bias", is_qwen2));
  if (is_qwen2 && !attention_bias) {
    return fields.Unsupported("attention_bias", "every Qwen2 has one");
  }
  config.qkv_bias = attention_bias;
  config.output_bias = attention_bias && !is_qwen2;
  return absl::OkStatus();
}

// The member has the name of transformers 5 or that of its predecessors.
absl::StatusOr<std::optional<c10::ScalarType>> ParseDtype(
    const ConfigFields& fields) {
  const char* name = fields.Find("dtype") != nullptr ? "dtype" : "torch_dtype";
  if (fields.Find(name) == nullptr) return std::nullopt;
  FSDP_ASSIGN_OR_RETURN(const std::string text, fields.Text(name));
  if (text == "float32") return c10::kFloat;
  if (text == "bfloat16") return c10::kBFloat16;
  if (text == "float16") return c10::kHalf;
  if (text == "float64") return c10::kDouble;
  return fields.Unsupported(
      name, "float32, bfloat16, float16 and float64 are supported");
}

absl::StatusOr<int64_t> ParseToken(const ConfigFields& fields, const char* name,
                                   const Json& value, int64_t vocab_size) {
  const auto* id = value.As<int64_t>();
  if (id == nullptr || *id < 0 || *id >= vocab_size) {
    return fields.Invalid(
        name, absl::StrCat("tokens are integers from 0 to ", vocab_size - 1,
                           ", below vocab_size"));
  }
  return *id;
}

absl::Status ParseTokens(const ConfigFields& fields, LlamaConfig& config) {
  if (const Json* id = fields.Find("bos_token_id")) {
    FSDP_ASSIGN_OR_RETURN(
        config.bos_token_id,
        ParseToken(fields, "bos_token_id", *id, config.vocab_size));
  }
  if (const Json* id = fields.Find("pad_token_id")) {
    // The first Llama has -1, which LibTorch counts from the end.
    const bool is_last = *id == Json(-1);
    FSDP_ASSIGN_OR_RETURN(
        config.pad_token_id,
        ParseToken(fields, "pad_token_id",
                   is_last ? Json(config.vocab_size - 1) : *id,
                   config.vocab_size));
  }
  const Json* eos = fields.Find("eos_token_id");
  if (eos == nullptr) return absl::OkStatus();
  const auto* several = eos->As<Json::Array>();
  for (const Json& id : several != nullptr ? *several : Json::Array{*eos}) {
    FSDP_ASSIGN_OR_RETURN(
        const int64_t token,
        ParseToken(fields, "eos_token_id", id, config.vocab_size));
    config.eos_token_ids.push_back(token);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LlamaConfig> ParseLlamaConfig(absl::string_view text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  if (json.As<Json::Object>() == nullptr) {
    return absl::InvalidArgumentError(
        "a config.json has to be an object, which this is not");
  }
  const ConfigFields fields(json);
  FSDP_ASSIGN_OR_RETURN(const Architecture architecture,
                        ParseArchitecture(fields));
  FSDP_RETURN_IF_ERROR(CheckSupported(fields));
  LlamaConfig config;
  FSDP_RETURN_IF_ERROR(ParseSizes(fields, architecture, config));
  FSDP_RETURN_IF_ERROR(ParseHeads(fields, architecture, config));
  FSDP_RETURN_IF_ERROR(
      CheckWindows(fields, architecture, config.num_hidden_layers));
  FSDP_RETURN_IF_ERROR(ParseBiases(fields, architecture, config));
  config.qk_norm = architecture == Architecture::kQwen3;
  FSDP_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                        fields.Bool("tie_word_embeddings", false));
  FSDP_ASSIGN_OR_RETURN(config.rms_norm_eps,
                        fields.Positive("rms_norm_eps", 1e-6));
  FSDP_ASSIGN_OR_RETURN(config.initializer_range,
                        fields.Positive("initializer_range", 0.02));
  FSDP_ASSIGN_OR_RETURN(config.rope,
                        ParseRopeConfig(json, config.max_position_embeddings));
  FSDP_ASSIGN_OR_RETURN(config.dtype, ParseDtype(fields));
  FSDP_RETURN_IF_ERROR(ParseTokens(fields, config));
  return config;
}

}  // namespace llama
