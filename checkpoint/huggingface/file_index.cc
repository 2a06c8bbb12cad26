#include "checkpoint/huggingface/file_index.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/json_members.h"
#include "base/status_macros.h"
#include "checkpoint/files/file_names.h"

namespace fsdp::checkpoint {
namespace {

// Of each member but the tensors: far more than any index has.
constexpr int64_t kMaxValues = 10'000;

// Some writers print it as 1e9 or 1000000000.0.
absl::StatusOr<std::optional<int64_t>> TotalBytes(const Json& metadata) {
  const Json* total = metadata.Find("total_size");
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

// `numbers`: of files, as index.weights has them. They become those of the
// sorted names.
void SortFiles(std::map<std::string, int> numbers, FileIndex& index) {
  std::vector<int> sorted(numbers.size());
  index.files.reserve(numbers.size());
  while (!numbers.empty()) {
    auto file = numbers.extract(numbers.begin());
    sorted[static_cast<size_t>(file.mapped())] =
        static_cast<int>(index.files.size());
    index.files.push_back(std::move(file.key()));
  }
  for (auto& [tensor, file] : index.weights) {
    file = sorted[static_cast<size_t>(file)];
  }
}

}  // namespace

absl::StatusOr<FileIndex> ParseFileIndex(absl::string_view json) {
  FileIndex index;
  bool has_weights = false;
  const auto take = [&](absl::string_view name,
                        const Json& value) -> absl::Status {
    if (name == "metadata") {
      FSDP_ASSIGN_OR_RETURN(index.total_bytes, TotalBytes(value));
    }
    has_weights |= name == "weight_map" && value.As<Json::Object>() != nullptr;
    return absl::OkStatus();
  };
  std::map<std::string, int> numbers;  // in the order of the text
  const auto take_weight = [&](std::string tensor,
                               const Json& value) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(std::string file, FileOf(tensor, value));
    const int next = static_cast<int>(numbers.size());
    const int number = numbers.emplace(std::move(file), next).first->second;
    index.weights.emplace_back(std::move(tensor), number);
    return absl::OkStatus();
  };
  FSDP_RETURN_IF_ERROR(
      ParseMembers(json, "weight_map", kMaxValues, take, take_weight));
  if (!has_weights) {
    return absl::InvalidArgumentError(
        "no index of files: it has no object \"weight_map\"");
  }
  SortFiles(std::move(numbers), index);
  return index;
}

}  // namespace fsdp::checkpoint
