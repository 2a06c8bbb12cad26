#include "checkpoint/huggingface/file_index.h"

#include <cmath>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_names.h"

namespace fsdp::checkpoint {
namespace {

// Some writers print it as 1e9 or 1000000000.0.
absl::StatusOr<std::optional<int64_t>> TotalBytes(const Json& index) {
  const Json* metadata = index.Find("metadata");
  const Json* total =
      metadata == nullptr ? nullptr : metadata->Find("total_size");
  if (total == nullptr || *total == Json()) return std::nullopt;
  constexpr double kMost = 9e18;
  const double value = total->NumberOr(-1);
  if (!(value >= 0 && value < kMost) || value != std::floor(value)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an index of files whose metadata.total_size is ",
        total->ToString().substr(0, 100), ", not a number of bytes"));
  }
  const int64_t* exact = total->As<int64_t>();
  return exact != nullptr ? *exact : static_cast<int64_t>(value);
}

absl::StatusOr<std::string> FileOf(absl::string_view tensor,
                                   const Json& value) {
  const std::string* file = value.As<std::string>();
  if (file == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("an index of files that has no file for tensor \"", tensor,
                     "\", but ", value.ToString().substr(0, 100)));
  }
  const absl::Status status = CheckPlainFileName(*file);
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "an index of files, tensor \"", tensor, "\": ", status.message()));
  }
  return *file;
}

}  // namespace

absl::StatusOr<FileIndex> ParseFileIndex(absl::string_view json) {
  FSDP_ASSIGN_OR_RETURN(Json parsed, Json::Parse(json));
  const Json* map = parsed.Find("weight_map");
  const Json::Object* weights =
      map == nullptr ? nullptr : map->As<Json::Object>();
  if (weights == nullptr) {
    return absl::InvalidArgumentError(
        "no index of files: it has no object \"weight_map\"");
  }
  FileIndex index;
  FSDP_ASSIGN_OR_RETURN(index.total_bytes, TotalBytes(parsed));
  std::map<std::string, int> numbers;
  for (const auto& [tensor, value] : *weights) {
    FSDP_ASSIGN_OR_RETURN(std::string file, FileOf(tensor, value));
    numbers[std::move(file)] = 0;
  }
  for (auto& [file, number] : numbers) {
    number = static_cast<int>(index.files.size());
    index.files.push_back(file);
  }
  index.weights.reserve(weights->size());
  for (const auto& [tensor, value] : *weights) {
    index.weights.emplace_back(tensor, numbers[*value.As<std::string>()]);
  }
  return index;
}

}  // namespace fsdp::checkpoint
