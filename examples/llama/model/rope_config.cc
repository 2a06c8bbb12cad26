#include "examples/llama/model/rope_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace llama {
namespace {

using fsdp::Json;

constexpr absl::string_view kOriginal = "original_max_position_embeddings";

// Members that each type may have.
constexpr std::array<absl::string_view, 4> kCommon = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor"};
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

template <typename Names>
bool Has(const Names& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

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

absl::Status CheckNames(const ConfigFields& fields, const Json& parameters,
                        const TypeNames* type) {
  for (const auto& [name, value] : *parameters.As<Json::Object>()) {
    if (Has(kCommon, name)) continue;
    if (type != nullptr && Has(type->names, name)) continue;
    return fields.Unsupported(
        name,
        absl::StrCat("rope of type ", type != nullptr ? type->type : "default",
                     " is only supported without it"));
  }
  if (const Json* part = fields.Find("partial_rotary_factor");
      part != nullptr && part->NumberOr(0) != 1) {
    return fields.Unsupported("partial_rotary_factor", "only 1 is supported");
  }
  return absl::OkStatus();
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

// Returns the type of the parameters, null for "default".
absl::StatusOr<const TypeNames*> ParseType(const ConfigFields& fields) {
  const char* name = fields.Find("rope_type") != nullptr ? "rope_type" : "type";
  FSDP_ASSIGN_OR_RETURN(const std::string type, fields.Text(name, "default"));
  for (const TypeNames& known : kTypes) {
    if (known.type == type) return &known;
  }
  if (type == "default") return nullptr;
  return fields.Unsupported(
      name, "default, linear, dynamic, yarn and llama3 are supported");
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
  FSDP_ASSIGN_OR_RETURN(const TypeNames* const type, ParseType(fields));
  FSDP_RETURN_IF_ERROR(CheckNames(fields, parameters, type));
  if (type != nullptr) {
    FSDP_ASSIGN_OR_RETURN(rope.scaling, ParseScaling(type->is, fields, outer,
                                                     max_position_embeddings));
  }
  return rope;
}

using fsdp::Json;

ConfigFields::ConfigFields(const Json& object, std::string prefix)
    : object_(object), prefix_(std::move(prefix)) {}

const Json* ConfigFields::Find(absl::string_view name) const {
  const Json* value = object_.Find(name);
  return value == nullptr || *value == Json() ? nullptr : value;
}

bool ConfigFields::Has(absl::string_view name) const {
  return object_.Find(name) != nullptr;
}

absl::StatusOr<int64_t> ConfigFields::Integer(absl::string_view name,
                                              std::optional<int64_t> otherwise,
                                              int64_t least) const {
  const Json* value = Find(name);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  const auto* number = value == nullptr ? nullptr : value->As<int64_t>();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (number == nullptr || *number < least || *number > kMost) {
    return Invalid(name, absl::StrCat("it has to be an integer from ", least,
                                      " to ", kMost));
  }
  return *number;
}

absl::StatusOr<double> ConfigFields::Positive(
    absl::string_view name, std::optional<double> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr && otherwise.has_value()) return *otherwise;
  const double number = value == nullptr ? 0 : value->NumberOr(0);
  if (!std::isfinite(number) || number <= 0) {
    return Invalid(name, "it has to be a number above 0");
  }
  return number;
}

absl::StatusOr<bool> ConfigFields::Bool(absl::string_view name,
                                        bool otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr) return otherwise;
  if (value->As<bool>() == nullptr) {
    return Invalid(name, "it has to be true or false");
  }
  return *value->As<bool>();
}

absl::StatusOr<std::string> ConfigFields::Text(
    absl::string_view name, std::optional<absl::string_view> otherwise) const {
  const Json* value = Find(name);
  if (value == nullptr && otherwise.has_value()) return std::string(*otherwise);
  const auto* text = value == nullptr ? nullptr : value->As<std::string>();
  if (text == nullptr) return Invalid(name, "it has to be a string");
  return *text;
}

absl::Status ConfigFields::Unsupported(absl::string_view name,
                                       absl::string_view supported) const {
  return absl::UnimplementedError(Told(name, supported));
}

absl::Status ConfigFields::Invalid(absl::string_view name,
                                   absl::string_view expected) const {
  return absl::InvalidArgumentError(Told(name, expected));
}

std::string ConfigFields::Told(absl::string_view name,
                               absl::string_view expected) const {
  // A stranger's file may have anything of any length here.
  constexpr size_t kShown = 80;
  const Json* value = object_.Find(name);
  std::string shown = value == nullptr ? "missing" : value->ToString();
  if (shown.size() > kShown) shown = shown.substr(0, kShown) + "...";
  return absl::StrCat(prefix_, name, " is ", shown, ": ", expected);
}

}  // namespace llama
