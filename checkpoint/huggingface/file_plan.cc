#include "checkpoint/huggingface/file_plan.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/files/new_path.h"

namespace fsdp::checkpoint {
namespace {

absl::Status CheckNames(absl::Span<const TensorInfo> tensors) {
  absl::flat_hash_set<absl::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) {
    if (names.insert(tensor.name).second) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor \"", tensor.name,
        "\" is given twice; tied parameters are stored under one name"));
  }
  return absl::OkStatus();
}

// Returns which tensors each file has, cut as huggingface_hub does: a tensor
// that is larger than a file gets its own, while the file before it stays open.
std::vector<std::vector<size_t>> Group(absl::Span<const int64_t> bytes,
                                       int64_t max_file_bytes) {
  std::vector<std::vector<size_t>> files;
  std::vector<size_t> open;
  int64_t open_bytes = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] > max_file_bytes) {
      files.push_back({i});
      continue;
    }
    if (bytes[i] > max_file_bytes - open_bytes) {
      files.push_back(std::exchange(open, {}));
      open_bytes = 0;
    }
    open.push_back(i);
    open_bytes += bytes[i];
  }
  if (!open.empty() || files.empty()) files.push_back(std::move(open));
  return files;
}

std::string FileName(absl::string_view stem, size_t index, size_t count) {
  return count == 1 ? absl::StrCat(stem, ".safetensors")
                    : absl::StrFormat("%s-%05d-of-%05d.safetensors", stem,
                                      index + 1, count);
}

// Writes one line for each tensor, for people and for diff.
std::string FormatIndex(absl::Span<const TensorInfo> tensors,
                        const FilePlan& plan) {
  std::string text =
      absl::StrCat("{\n  \"metadata\": {\"total_size\": ", plan.total_bytes,
                   "},\n  \"weight_map\": {");
  absl::string_view separator = "\n    ";
  for (size_t i = 0; i < tensors.size(); ++i) {
    const PlannedFile& file = plan.files[plan.tensors[i].file];
    absl::StrAppend(&text, separator, Json(tensors[i].name).ToString(), ": ",
                    Json(file.name).ToString());
    separator = ",\n    ";
  }
  absl::StrAppend(&text, "\n  }\n}\n");
  return text;
}

absl::StatusOr<PlannedFile> PlanFile(absl::Span<const TensorInfo> tensors,
                                     absl::Span<const size_t> group,
                                     const FilePlanOptions& options,
                                     FilePlan& plan) {
  std::vector<TensorInfo> infos;
  infos.reserve(group.size());
  for (const size_t i : group) infos.push_back(tensors[i]);
  FSDP_ASSIGN_OR_RETURN(std::vector<PlacedTensor> placed, PlaceTensors(infos));
  PlannedFile file;
  FSDP_ASSIGN_OR_RETURN(file.header,
                        FormatSafetensorsHeader(placed, options.metadata));
  file.bytes = static_cast<int64_t>(file.header.size());
  for (size_t k = 0; k < group.size(); ++k) {
    const int64_t bytes = placed[k].end - placed[k].begin;
    plan.tensors[group[k]] = {
        static_cast<int>(plan.files.size()),
        static_cast<int64_t>(file.header.size()) + placed[k].begin, bytes};
    if (__builtin_add_overflow(file.bytes, bytes, &file.bytes)) {
      return absl::InvalidArgumentError(
          "a file of more bytes than 64 bits count");
    }
  }
  return file;
}

}  // namespace

absl::StatusOr<FilePlan> PlanFiles(absl::Span<const TensorInfo> tensors,
                                   const FilePlanOptions& options) {
  FSDP_RETURN_IF_ERROR(CheckNames(tensors));
  FilePlan plan;
  std::vector<int64_t> bytes(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(bytes[i], BytesOf(tensors[i]));
    if (__builtin_add_overflow(plan.total_bytes, bytes[i], &plan.total_bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors up to \"", tensors[i].name,
                       "\" have more bytes than 64 bits count"));
    }
  }
  const std::vector<std::vector<size_t>> groups =
      Group(bytes, options.max_file_bytes);
  plan.tensors.resize(tensors.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(PlannedFile file,
                          PlanFile(tensors, groups[i], options, plan));
    file.name = FileName(options.stem, i, groups.size());
    FSDP_RETURN_IF_ERROR(CheckPlainFileName(file.name));
    plan.files.push_back(std::move(file));
  }
  if (groups.size() > 1) {
    plan.index_name = absl::StrCat(options.stem, ".safetensors.index.json");
    plan.index = FormatIndex(tensors, plan);
  }
  return plan;
}

namespace {

// Values of each member but the tensors; no index has nearly as many.
constexpr int64_t kMaxValues = 10'000;

// Some writers print the total as 1e9 or 1000000000.0.
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

// Sorts the files of `index` by name. `numbers` says which number each has in
// index.weights so far.
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
  std::map<std::string, int> numbers;  // numbers in the order of the text
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
