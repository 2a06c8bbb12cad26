#include "examples/llama/model/llama_config.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace llama {
namespace {

using fsdp::Json;

// The members of a JSON object, with checks. A member that is null counts as
// absent. For an absent member `otherwise` is returned; without `otherwise`
// that is an error. Errors are InvalidArgument, and name the member, its value
// and what it may be.
class ConfigFields {
 public:
  // `object` is an object and outlives this. `prefix` precedes names in errors:
  // "rope_scaling.".
  explicit ConfigFields(const Json& object, std::string prefix = "")
      : object_(object), prefix_(std::move(prefix)) {}

  // Returns null if there is no such member.
  const Json* Find(absl::string_view name) const {
    const Json* value = object_.Find(name);
    return value == nullptr || *value == Json() ? nullptr : value;
  }
  // Returns whether there is such a member, even if it is null.
  bool Has(absl::string_view name) const {
    return object_.Find(name) != nullptr;
  }

  // A value from `least` to 2^31 - 1, so that products of two fit.
  absl::StatusOr<int64_t> Integer(
      absl::string_view name, std::optional<int64_t> otherwise = std::nullopt,
      int64_t least = 1) const {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (Find(name) == nullptr && otherwise.has_value()) return *otherwise;
    const auto* const n = object_.FindAs<int64_t>(name);
    if (n != nullptr && *n >= least && *n <= kMost) return *n;
    return Invalid(name, absl::StrCat("it has to be an integer from ", least,
                                      " to ", kMost));
  }
  // A value above zero and finite.
  absl::StatusOr<double> Positive(
      absl::string_view name,
      std::optional<double> otherwise = std::nullopt) const {
    const Json* value = Find(name);
    if (value == nullptr && otherwise.has_value()) return *otherwise;
    const double number = value == nullptr ? 0 : value->NumberOr(0);
    if (std::isfinite(number) && number > 0) return number;
    return Invalid(name, "it has to be a number above 0");
  }
  absl::StatusOr<bool> Bool(absl::string_view name, bool otherwise) const {
    if (Find(name) == nullptr) return otherwise;
    const auto* const value = object_.FindAs<bool>(name);
    if (value != nullptr) return *value;
    return Invalid(name, "it has to be true or false");
  }
  absl::StatusOr<std::string> Text(
      absl::string_view name,
      std::optional<std::string> otherwise = std::nullopt) const {
    if (Find(name) == nullptr && otherwise.has_value()) return *otherwise;
    const auto* const value = object_.FindAs<std::string>(name);
    if (value != nullptr) return *value;
    return Invalid(name, "it has to be a string");
  }

  // Returns Unimplemented: "`name` is VALUE: `supported`".
  absl::Status Unsupported(absl::string_view name,
                           absl::string_view supported) const {
    return absl::UnimplementedError(Told(name, supported));
  }
  // Returns InvalidArgument in the same words.
  absl::Status Invalid(absl::string_view name,
                       absl::string_view expected) const {
    return absl::InvalidArgumentError(Told(name, expected));
  }

 private:
  std::string Told(absl::string_view name, absl::string_view expected) const {
    // A stranger's file may have anything of any length here.
    constexpr size_t kShown = 80;
    const Json* value = object_.Find(name);
    std::string shown = value == nullptr ? "missing" : value->ToString();
    if (shown.size() > kShown) shown = shown.substr(0, kShown) + "...";
    return absl::StrCat(prefix_, name, " is ", shown, ": ", expected);
  }

  const Json& object_;
  const std::string prefix_;
};

// --- Rope --------------------------------------------------------------------

constexpr absl::string_view kOriginal = "original_max_position_embeddings";

// Members that each type may have.
constexpr absl::string_view kCommon[] = {"rope_type", "type", "rope_theta",
                                         "partial_rotary_factor"};
// A type other than "default", and its further members.
struct TypeNames {
  absl::string_view type;
  RopeScaling::Type is;
  std::vector<absl::string_view> names;
};
const TypeNames kTypes[] = {
    {"linear", RopeScaling::Type::kLinear, {"factor"}},
    {"dynamic", RopeScaling::Type::kDynamic, {"factor", kOriginal}},
    {"yarn",
     RopeScaling::Type::kYarn,
     {"factor", kOriginal, "beta_slow", "beta_fast", "attention_factor"}},
    {"llama3",
     RopeScaling::Type::kLlama3,
     {"factor", kOriginal, "low_freq_factor", "high_freq_factor"}}};

// Returns the name of the member with the parameters, null if there is none.
absl::StatusOr<const char*> FindParameters(const ConfigFields& config) {
  const char* found = nullptr;
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    const Json* value = config.Find(name);
    if (value == nullptr) continue;
    const auto* members = value->As<Json::Object>();
    if (members == nullptr) {
      return config.Invalid(name, "it has to be an object");
    }
    if (members->empty()) continue;
    if (found != nullptr && !(*value == *config.Find(found))) {
      return config.Invalid(name, absl::StrCat("it contradicts ", found));
    }
    found = name;
  }
  return found;
}

// Returns the type of the parameters, null for "default".
absl::StatusOr<const TypeNames*> ParseType(const ConfigFields& fields,
                                           const Json& parameters) {
  const char* key = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  FSDP_ASSIGN_OR_RETURN(const std::string text, fields.Text(key, "default"));
  const auto* type = absl::c_find_if(
      kTypes, [&](const TypeNames& known) { return known.type == text; });
  if (type == std::end(kTypes)) type = nullptr;
  if (type == nullptr && text != "default") {
    return fields.Unsupported(
        key, "default, linear, dynamic, yarn and llama3 are supported");
  }
  for (const auto& [name, value] : *parameters.As<Json::Object>()) {
    if (absl::c_linear_search(kCommon, name)) continue;
    if (type != nullptr && absl::c_linear_search(type->names, name)) continue;
    return fields.Unsupported(name, absl::StrCat("rope of type ", text,
                                                 " is only supported without "
                                                 "it"));
  }
  const Json* part = fields.Find("partial_rotary_factor");
  if (part != nullptr && part->NumberOr(0) != 1) {
    return fields.Unsupported("partial_rotary_factor", "only 1 is supported");
  }
  return type;
}

absl::StatusOr<RopeScaling> ParseScaling(RopeScaling::Type type,
                                         const ConfigFields& fields,
                                         const ConfigFields& config,
                                         int64_t max_position_embeddings) {
  using Type = RopeScaling::Type;
  RopeScaling scaling{type, 1};
  FSDP_ASSIGN_OR_RETURN(scaling.factor, fields.Positive("factor"));
  scaling.tokens = max_position_embeddings;
  if (type == Type::kLinear || type == Type::kDynamic) return scaling;
  const bool is_yarn = type == Type::kYarn;
  const char* const low = is_yarn ? "beta_slow" : "low_freq_factor";
  const char* const high = is_yarn ? "beta_fast" : "high_freq_factor";
  std::optional<double> default_low;
  std::optional<double> default_high;
  if (is_yarn) {
    default_low = 1;
    default_high = 32;
    const double more = scaling.factor > 1 ? std::log(scaling.factor) : 0;
    FSDP_ASSIGN_OR_RETURN(scaling.attention_factor,
                          fields.Positive("attention_factor", 0.1 * more + 1));
  }
  FSDP_ASSIGN_OR_RETURN(scaling.low, fields.Positive(low, default_low));
  FSDP_ASSIGN_OR_RETURN(scaling.high, fields.Positive(high, default_high));
  if (scaling.high <= scaling.low) {
    return fields.Invalid(high, absl::StrCat("it has to be above ", low,
                                             ", which is ", scaling.low));
  }
  // transformers 5 prefers the value outside, 4 does not read it.
  FSDP_ASSIGN_OR_RETURN(const int64_t outside,
                        config.Integer(kOriginal, max_position_embeddings));
  FSDP_ASSIGN_OR_RETURN(scaling.tokens, fields.Integer(kOriginal, outside));
  if (config.Find(kOriginal) != nullptr && outside != scaling.tokens) {
    return fields.Invalid(kOriginal, absl::StrCat("outside it is ", outside));
  }
  return scaling;
}

}  // namespace

absl::StatusOr<RopeConfig> ParseRopeConfig(const Json& config,
                                           int64_t max_position_embeddings) {
  const ConfigFields outer(config);
  RopeConfig rope;
  FSDP_ASSIGN_OR_RETURN(rope.theta, outer.Positive("rope_theta", rope.theta));
  FSDP_ASSIGN_OR_RETURN(const char* const name, FindParameters(outer));
  if (name == nullptr) return rope;
  const Json& parameters = *outer.Find(name);
  const ConfigFields fields(parameters, absl::StrCat(name, "."));
  FSDP_ASSIGN_OR_RETURN(const double theta,
                        fields.Positive("rope_theta", rope.theta));
  if (outer.Find("rope_theta") != nullptr && theta != rope.theta) {
    return fields.Invalid("rope_theta",
                          absl::StrCat("outside it is ", rope.theta));
  }
  rope.theta = theta;
  FSDP_ASSIGN_OR_RETURN(const TypeNames* const type,
                        ParseType(fields, parameters));
  if (type != nullptr) {
    FSDP_ASSIGN_OR_RETURN(rope.scaling, ParseScaling(type->is, fields, outer,
                                                     max_position_embeddings));
  }
  return rope;
}

// --- The rest ----------------------------------------------------------------

namespace {

// Layers from max_window_layers on have windows if use_sliding_window says so.
// Defaults are those of transformers, whose Llama has no windows at all.
absl::Status CheckWindows(const ConfigFields& fields, absl::string_view type,
                          int64_t layers) {
  constexpr absl::string_view kSupported =
      "attention is only supported over all tokens, without a sliding window";
  const bool is_llama = type == "llama";
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
  for (const Json& one : *types->As<Json::Array>()) {
    if (!(one == Json("full_attention"))) {
      return fields.Unsupported("layer_types", kSupported);
    }
  }
  return absl::OkStatus();
}

// Refuses what would be computed in another way than here.
absl::Status CheckSupported(const ConfigFields& fields) {
  constexpr absl::string_view kNoDropout =
      "there is no dropout: only 0 is supported";
  constexpr absl::string_view kDense = "only dense models are supported";
  constexpr absl::string_view kDtypes =
      "float32, bfloat16, float16 and float64 are supported";
  const Json::Array zero = {0, 0.0};
  const Json::Array dtypes = {"float32", "bfloat16", "float16", "float64"};
  const struct {
    absl::string_view name;
    Json::Array values;  // that are supported
    absl::string_view supported;
  } members[] = {
      {"attention_dropout", zero, kNoDropout},
      {"hidden_dropout", zero, kNoDropout},
      {"hidden_dropout_prob", zero, kNoDropout},
      {"residual_dropout", zero, kNoDropout},
      {"resid_pdrop", zero, kNoDropout},
      {"embd_pdrop", zero, kNoDropout},
      {"num_experts", zero, kDense},
      {"num_local_experts", zero, kDense},
      {"n_routed_experts", zero, kDense},
      {"partial_rotary_factor", {1, 1.0}, "only 1 is supported"},
      {"quantization_config", {}, "only weights as they are are supported"},
      {"is_causal", {true}, "only true is supported"},
      {"hidden_act", {"silu"}, "only silu is supported"},
      // The name of transformers 5, and that of its predecessors.
      {"dtype", dtypes, kDtypes},
      {"torch_dtype", dtypes, kDtypes}};
  for (const auto& member : members) {
    const Json* value = fields.Find(member.name);
    if (value == nullptr || absl::c_linear_search(member.values, *value)) {
      continue;
    }
    return fields.Unsupported(member.name, member.supported);
  }
  return absl::OkStatus();
}

// Defaults are those of transformers.
absl::Status ParseSizes(const ConfigFields& fields, absl::string_view type,
                        LlamaConfig& config) {
  const bool is_llama = type == "llama";
  const bool is_qwen3 = type == "qwen3";
  FSDP_ASSIGN_OR_RETURN(config.vocab_size, fields.Integer("vocab_size"));
  FSDP_ASSIGN_OR_RETURN(config.hidden_size, fields.Integer("hidden_size"));
  FSDP_ASSIGN_OR_RETURN(config.intermediate_size,
                        fields.Integer("intermediate_size"));
  FSDP_ASSIGN_OR_RETURN(config.num_hidden_layers,
                        fields.Integer("num_hidden_layers"));
  FSDP_ASSIGN_OR_RETURN(
      config.max_position_embeddings,
      fields.Integer("max_position_embeddings", is_llama ? 2048 : 32768));
  FSDP_ASSIGN_OR_RETURN(config.num_attention_heads,
                        fields.Integer("num_attention_heads"));
  // A null means as many as there are query heads, also for Qwen.
  const bool as_queries = is_llama || fields.Has("num_key_value_heads");
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
  if (config.head_dim % 2 == 0) return absl::OkStatus();
  return fields.Invalid("head_dim",
                        absl::StrCat("heads have ", config.head_dim,
                                     " elements, which has to be even"));
}

absl::Status ParseBiases(const ConfigFields& fields, absl::string_view type,
                         LlamaConfig& config) {
  FSDP_ASSIGN_OR_RETURN(config.mlp_bias, fields.Bool("mlp_bias", false));
  if (config.mlp_bias && type != "llama") {
    return fields.Unsupported("mlp_bias", "no Qwen has one");
  }
  const bool is_qwen2 = type == "qwen2";
  FSDP_ASSIGN_OR_RETURN(config.qkv_bias,
                        fields.Bool("attention_bias", is_qwen2));
  if (is_qwen2 && !config.qkv_bias) {
    return fields.Unsupported("attention_bias", "every Qwen2 has one");
  }
  config.output_bias = config.qkv_bias && !is_qwen2;
  return absl::OkStatus();
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

absl::Status ParseEndTokens(const ConfigFields& fields, LlamaConfig& config) {
  const Json* eos = fields.Find("eos_token_id");
  if (eos == nullptr) return absl::OkStatus();
  config.eos_token_ids.clear();
  const auto* several = eos->As<Json::Array>();
  for (const Json& id : several != nullptr ? *several : Json::Array{*eos}) {
    FSDP_ASSIGN_OR_RETURN(
        const int64_t token,
        ParseToken(fields, "eos_token_id", id, config.vocab_size));
    config.eos_token_ids.push_back(token);
  }
  return absl::OkStatus();
}

absl::Status ParseTokens(const ConfigFields& fields, LlamaConfig& config) {
  if (const Json* id = fields.Find("pad_token_id")) {
    // The first Llama has -1, which LibTorch counts from the end.
    const bool is_last = *id == Json(-1);
    FSDP_ASSIGN_OR_RETURN(
        config.pad_token_id,
        ParseToken(fields, "pad_token_id",
                   is_last ? Json(config.vocab_size - 1) : *id,
                   config.vocab_size));
  }
  return ParseEndTokens(fields, config);
}

}  // namespace

absl::Status TakeGenerationConfig(absl::string_view text, LlamaConfig& config) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  if (json.As<Json::Object>() == nullptr) {
    return absl::InvalidArgumentError("it is no object");
  }
  return ParseEndTokens(ConfigFields(json), config);
}

absl::StatusOr<LlamaConfig> ParseLlamaConfig(absl::string_view text) {
  FSDP_ASSIGN_OR_RETURN(const Json json, Json::Parse(text));
  if (json.As<Json::Object>() == nullptr) {
    return absl::InvalidArgumentError(
        "a config.json has to be an object, which this is not");
  }
  const ConfigFields fields(json);
  FSDP_ASSIGN_OR_RETURN(const std::string type, fields.Text("model_type"));
  if (type != "llama" && type != "qwen2" && type != "qwen3") {
    return fields.Unsupported("model_type",
                              "llama, qwen2 and qwen3 are supported");
  }
  FSDP_RETURN_IF_ERROR(CheckSupported(fields));
  LlamaConfig config;
  FSDP_RETURN_IF_ERROR(ParseSizes(fields, type, config));
  FSDP_RETURN_IF_ERROR(CheckWindows(fields, type, config.num_hidden_layers));
  FSDP_RETURN_IF_ERROR(ParseBiases(fields, type, config));
  config.qk_norm = type == "qwen3";
  FSDP_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                        fields.Bool("tie_word_embeddings", false));
  FSDP_ASSIGN_OR_RETURN(config.rms_norm_eps,
                        fields.Positive("rms_norm_eps", 1e-6));
  FSDP_ASSIGN_OR_RETURN(config.initializer_range,
                        fields.Positive("initializer_range", 0.02));
  FSDP_ASSIGN_OR_RETURN(config.rope,
                        ParseRopeConfig(json, config.max_position_embeddings));
  FSDP_RETURN_IF_ERROR(ParseTokens(fields, config));
  return config;
}

}  // namespace llama
