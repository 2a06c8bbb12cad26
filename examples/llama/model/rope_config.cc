#include "examples/llama/model/rope_config.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "examples/llama/model/config_fields.h"

namespace llama {
namespace {

using fsdp::Json;

constexpr absl::string_view kOriginal = "original_max_position_embeddings";

// Of every type.
constexpr std::array<absl::string_view, 4> kCommon = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor"};
constexpr std::array<absl::string_view, 4> kOfLlama3 = {
    "factor", "low_freq_factor", "high_freq_factor", kOriginal};

template <typename Names>
bool Has(const Names& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The member of `config` with the parameters; null if there is none.
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

absl::Status CheckNames(const ConfigFields& fields, const Json& parameters,
                        bool is_llama3) {
  for (const auto& [name, value] : *parameters.As<Json::Object>()) {
    if (Has(kCommon, name) || (is_llama3 && Has(kOfLlama3, name))) continue;
    return fields.Unsupported(
        name, absl::StrCat("rope of type ", is_llama3 ? "llama3" : "default",
                           " is only supported without it"));
  }
  if (const Json* part = fields.Find("partial_rotary_factor");
      part != nullptr && part->NumberOr(0) != 1) {
    return fields.Unsupported("partial_rotary_factor", "only 1 is supported");
  }
  return absl::OkStatus();
}

absl::StatusOr<Llama3Scaling> ParseLlama3(const ConfigFields& fields,
                                          const ConfigFields& config,
                                          int64_t max_position_embeddings) {
  Llama3Scaling scaling;
  FSDP_ASSIGN_OR_RETURN(scaling.factor, fields.Positive("factor"));
  FSDP_ASSIGN_OR_RETURN(scaling.low_freq_factor,
                        fields.Positive("low_freq_factor"));
  FSDP_ASSIGN_OR_RETURN(scaling.high_freq_factor,
                        fields.Positive("high_freq_factor"));
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    return fields.Invalid(
        "high_freq_factor",
        absl::StrCat("it has to be above low_freq_factor, which is ",
                     scaling.low_freq_factor));
  }
  // transformers 5 prefers what stands outside, 4 does not read it.
  FSDP_ASSIGN_OR_RETURN(const int64_t outside,
                        config.Integer(kOriginal, max_position_embeddings));
  FSDP_ASSIGN_OR_RETURN(scaling.original_max_position_embeddings,
                        fields.Integer(kOriginal, outside));
  if (config.Find(kOriginal) != nullptr &&
      outside != scaling.original_max_position_embeddings) {
    return fields.Invalid(kOriginal, absl::StrCat("outside it is ", outside));
  }
  return scaling;
}

// The type where it is one of ours.
absl::StatusOr<std::string> ParseType(const ConfigFields& fields) {
  const char* name = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  FSDP_ASSIGN_OR_RETURN(std::string type, fields.Text(name, "default"));
  if (type != "default" && type != "llama3") {
    return fields.Unsupported(name, "default and llama3 are supported");
  }
  return type;
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
  FSDP_ASSIGN_OR_RETURN(const std::string type, ParseType(fields));
  const bool is_llama3 = type == "llama3";
  FSDP_RETURN_IF_ERROR(CheckNames(fields, parameters, is_llama3));
  if (is_llama3) {
    FSDP_ASSIGN_OR_RETURN(rope.scaling,
                          ParseLlama3(fields, outer, max_position_embeddings));
  }
  return rope;
}

}  // namespace llama
