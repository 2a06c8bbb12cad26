#include "checkpoint/catalog/shard_files.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/safetensors/safetensors_header.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {
namespace {

// What one file has, side by side.
struct Contents {
  std::vector<TensorInfo> infos;
  std::vector<ShardPiece> pieces;
  ShardingInfo sharding;
};

absl::Status Refuse(const TensorInfo& tensor, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor \"", tensor.name, "\", ", ToString(tensor), ": ", why));
}

absl::Status CheckRange(const RankRange& range) {
  FSDP_RETURN_IF_ERROR(BytesOf(range.tensor).status());
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(range.tensor));
  if (range.begin < 0 || range.begin > range.end || range.end > numel) {
    return Refuse(range.tensor, absl::StrCat("has no elements ", range.begin,
                                             " to ", range.end));
  }
  if (ItemBytes(range.tensor.dtype) == 0) {
    return Refuse(range.tensor,
                  "elements that do not fill bytes cannot be sharded");
  }
  return absl::OkStatus();
}

std::vector<Box> BoxesOf(int rank, const RankRange& range) {
  const std::vector<int64_t>& shape = range.tensor.shape;
  for (const int64_t size : shape) {
    if (size != 0) continue;
    if (rank != 0) return {};
    return {{std::vector<int64_t>(shape.size(), 0), shape}};
  }
  return RangeToBoxes(shape, range.begin, range.end);
}

// By file: the k-th box of every range is in the k-th.
std::vector<Contents> Distribute(int rank, absl::Span<const RankRange> ranges) {
  std::vector<Contents> files;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const TensorInfo& tensor = ranges[i].tensor;
    int64_t begin = ranges[i].begin;
    size_t k = 0;
    for (Box& box : BoxesOf(rank, ranges[i])) {
      if (k == files.size()) files.emplace_back();
      Contents& file = files[k++];
      const int64_t end = std::accumulate(box.sizes.begin(), box.sizes.end(),
                                          int64_t{1}, std::multiplies<>()) +
                          begin;
      file.pieces.push_back({static_cast<int>(i), begin, end, 0});
      file.sharding[tensor.name] = {tensor.name, std::move(box.offsets),
                                    tensor.shape, static_cast<int64_t>(i)};
      file.infos.push_back({tensor.name, tensor.dtype, std::move(box.sizes)});
      begin = end;
    }
  }
  return files;
}

absl::StatusOr<ShardFile> Finish(std::string name, Contents contents) {
  ShardFile file;
  file.name = std::move(name);
  FSDP_ASSIGN_OR_RETURN(const std::vector<PlacedTensor> placed,
                        PlaceTensors(contents.infos));
  FSDP_ASSIGN_OR_RETURN(
      file.header,
      FormatSafetensorsHeader(placed, {{std::string(kShardingInfoKey),
                                        FormatShardingInfo(contents.sharding)},
                                       {"DCP_VERSION", "1.0"},
                                       {"format", "pt"}}));
  file.bytes = static_cast<int64_t>(file.header.size());
  file.pieces = std::move(contents.pieces);
  for (size_t i = 0; i < placed.size(); ++i) {
    file.pieces[i].offset =
        static_cast<int64_t>(file.header.size()) + placed[i].begin;
    file.bytes += placed[i].end - placed[i].begin;
  }
  return file;
}

constexpr absl::string_view kDigits = "0123456789";
constexpr size_t kMinDigits = 5;

// Take the digits away; false: there are fewer than names have.
bool ConsumeFirstNumber(absl::string_view* text) {
  const size_t digits =
      std::min(text->find_first_not_of(kDigits), text->size());
  text->remove_prefix(digits);
  return digits >= kMinDigits;
}
bool ConsumeLastNumber(absl::string_view* text) {
  const size_t last = text->find_last_not_of(kDigits);
  const size_t begin = last == absl::string_view::npos ? 0 : last + 1;
  const size_t digits = text->size() - begin;
  text->remove_suffix(digits);
  return digits >= kMinDigits;
}

}  // namespace

absl::StatusOr<std::vector<ShardFile>> PlanShardFiles(
    int rank, absl::Span<const RankRange> ranges, absl::string_view stem) {
  absl::flat_hash_set<absl::string_view> names;
  for (const RankRange& range : ranges) {
    FSDP_RETURN_IF_ERROR(CheckRange(range));
    if (!names.insert(range.tensor.name).second) {
      return Refuse(range.tensor, "is given twice");
    }
  }
  std::vector<Contents> contents = Distribute(rank, ranges);
  if (rank == 0 && contents.empty()) contents.emplace_back();
  std::vector<ShardFile> files;
  for (size_t i = 0; i < contents.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(
        ShardFile file,
        Finish(absl::StrFormat("shard-%05d-%s-%05d-of-%05d.safetensors",
                               rank + 1, stem, i + 1, contents.size()),
               std::move(contents[i])));
    files.push_back(std::move(file));
  }
  return files;
}

std::optional<std::string> StemOfShardFile(absl::string_view name) {
  absl::string_view stem = LastPart(name);
  const bool is_shard =
      absl::ConsumePrefix(&stem, "shard-") && ConsumeFirstNumber(&stem) &&
      absl::ConsumePrefix(&stem, "-") &&
      absl::ConsumeSuffix(&stem, ".safetensors") && ConsumeLastNumber(&stem) &&
      absl::ConsumeSuffix(&stem, "-of-") && ConsumeLastNumber(&stem) &&
      absl::ConsumeSuffix(&stem, "-") && !stem.empty();
  if (!is_shard) return std::nullopt;
  return absl::StrCat(FolderPart(name), stem);
}

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
