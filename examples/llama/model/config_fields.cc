#include "examples/llama/model/config_fields.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/json.h"

namespace llama {

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
