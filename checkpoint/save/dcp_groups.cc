#include "checkpoint/save/dcp_groups.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/dcp/writer.h"
#include "checkpoint/run/optimizer_options.h"
#include "checkpoint/save/dcp_export.h"
#include "checkpoint/torch_archive/value.h"
#include "fsdp/state/optimizer_values.h"

namespace fsdp::checkpoint {
namespace {

using Option = std::pair<std::string, Value>;

// Numbers and pairs of them, which are tuples in Python.
Value ValueOf(const Json& json) {
  if (const bool* const flag = json.As<bool>()) return Value{*flag};
  if (const Json::Array* const pair = json.As<Json::Array>()) {
    Value::Tuple tuple;
    for (const Json& one : *pair) tuple.items.push_back(ValueOf(one));
    return Value{std::move(tuple)};
  }
  return Value{json.NumberOr(0)};
}

// What groups of torch.optim have besides, by the name of the class.
std::vector<Option> DefaultsOf(const std::string& name) {
  const Value no{false};
  const Value none{Value::None()};
  std::vector<Option> defaults = {
      {"maximize", no}, {"foreach", none}, {"differentiable", no}};
  const bool is_adam = name == "Adam" || name == "AdamW";
  if (is_adam || name == "RMSprop") defaults.emplace_back("capturable", no);
  if (name != "RMSprop") defaults.emplace_back("fused", none);
  if (is_adam) {
    defaults.emplace_back("decoupled_weight_decay", Value{name == "AdamW"});
  }
  return defaults;
}

absl::StatusOr<std::vector<Option>> OptionsOf(const OptimizerGroup& group) {
  FSDP_ASSIGN_OR_RETURN(const Json json, OptionsToJson(*group.options));
  std::vector<Option> options;
  std::string name;
  for (const auto& [key, value] : *json.As<Json::Object>()) {
    if (const std::string* const text = value.As<std::string>()) {
      name = *text;
    } else {
      options.emplace_back(key, ValueOf(value));
    }
  }
  for (Option& option : DefaultsOf(name)) options.push_back(std::move(option));
  return options;
}

}  // namespace

absl::StatusOr<std::vector<DcpWriteValue>> DcpGroupValues(
    DcpNames names, absl::Span<const OptimizerGroup> groups) {
  std::vector<DcpWriteValue> values;
  for (size_t i = 0; i < groups.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(const std::vector<Option> options,
                          OptionsOf(groups[i]));
    if (names == DcpNames::kTorchtitan) {
      for (const std::string& name : groups[i].names) {
        for (const auto& [key, value] : options) {
          const std::string path =
              absl::StrCat("param_groups.", name, ".", key);
          values.push_back({{"optimizer", path}, value});
        }
      }
      continue;
    }
    const auto add = [&](const std::string& key, Value value) {
      values.push_back({{"optim", "param_groups", static_cast<int64_t>(i), key},
                        std::move(value)});
    };
    for (const auto& [key, value] : options) add(key, value);
    Value::List parameters;
    for (const std::string& name : groups[i].names) {
      parameters.items.push_back(Value{name});
    }
    add("params", Value{std::move(parameters)});
  }
  return values;
}

}  // namespace fsdp::checkpoint
