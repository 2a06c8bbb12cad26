#include "checkpoint/catalog/sharding_info.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

constexpr absl::string_view kOffsets = "saved_offsets";
constexpr absl::string_view kTensor = "logical_fqn";
constexpr absl::string_view kShape = "global_shape";
constexpr absl::string_view kPosition = "tensor_position";
constexpr int64_t kMaxValues = 1024;  // of an entry

absl::Status Refuse(absl::string_view name, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat(kShardingInfoKey, " of \"", name, "\": ", why));
}

absl::StatusOr<std::vector<int64_t>> Sizes(absl::string_view name,
                                           absl::string_view key,
                                           const Json& json) {
  std::vector<int64_t> sizes;
  const Json::Array* array = json.As<Json::Array>();
  for (size_t i = 0; array != nullptr && i < array->size(); ++i) {
    const int64_t* size = (*array)[i].As<int64_t>();
    if (size == nullptr || *size < 0) break;
    sizes.push_back(*size);
  }
  if (array == nullptr || sizes.size() != array->size()) {
    return Refuse(name,
                  absl::StrCat("\"", key, "\" is no list of integers >= 0"));
  }
  return sizes;
}

absl::StatusOr<ShardEntry> ParseEntry(const std::string& name,
                                      const Json& json) {
  ShardEntry entry{name, {}, std::nullopt, std::nullopt};
  const Json* offsets = json.Find(kOffsets);
  if (offsets == nullptr) return Refuse(name, "it has no \"saved_offsets\"");
  FSDP_ASSIGN_OR_RETURN(entry.offsets, Sizes(name, kOffsets, *offsets));
  if (const Json* shape = json.Find(kShape)) {
    FSDP_ASSIGN_OR_RETURN(entry.global_shape, Sizes(name, kShape, *shape));
  }
  if (const Json* position = json.Find(kPosition)) {
    const auto* const number = position->As<int64_t>();
    if (number == nullptr || *number < 0) {
      return Refuse(name, "\"tensor_position\" is no integer >= 0");
    }
    entry.position = *number;
  }
  if (const Json* tensor = json.Find(kTensor)) {
    if (tensor->As<std::string>() == nullptr) {
      return Refuse(name, "\"logical_fqn\" is no string");
    }
    entry.tensor = *tensor->As<std::string>();
  }
  return entry;
}

}  // namespace

std::string FormatShardingInfo(const ShardingInfo& info) {
  Json::Object object;
  for (const auto& [name, entry] : info) {
    Json::Object members{{std::string(kOffsets), entry.offsets}};
    if (entry.tensor != name) {
      members.emplace_back(kTensor, entry.tensor);
    }
    if (entry.global_shape.has_value()) {
      members.emplace_back(kShape, *entry.global_shape);
    }
    if (entry.position.has_value()) {
      members.emplace_back(kPosition, *entry.position);
    }
    object.emplace_back(name, std::move(members));
  }
  return Json(std::move(object)).ToString();
}

absl::StatusOr<ShardingInfo> ParseShardingInfo(absl::string_view json) {
  ShardingInfo info;
  FSDP_RETURN_IF_ERROR(Json::ParseMembers(
      json, kMaxValues,
      [&info](const std::string& name, const Json& value) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(info[name], ParseEntry(name, value));
        return absl::OkStatus();
      }));
  return info;
}

}  // namespace fsdp::checkpoint
