#include "checkpoint/format/file_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "checkpoint/format/safetensors_header.h"

namespace fsdp::checkpoint {
namespace {

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

// Writes one line for each tensor, for people and for diff.
std::string FormatIndex(absl::Span<const TensorInfo> tensors,
                        const FilePlan& plan, int64_t total_bytes) {
  std::string text =
      absl::StrCat("{\n  \"metadata\": {\"total_size\": ", total_bytes,
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
                                     FilePlan& plan) {
  std::vector<TensorInfo> infos;
  infos.reserve(group.size());
  for (const size_t i : group) infos.push_back(tensors[i]);
  FSDP_ASSIGN_OR_RETURN(std::vector<PlacedTensor> placed, PlaceTensors(infos));
  PlannedFile file;
  // transformers reads no file without this.
  const SafetensorsMetadata metadata = {{"format", "pt"}};
  FSDP_ASSIGN_OR_RETURN(file.header, FormatSafetensorsHeader(placed, metadata));
  file.bytes = static_cast<int64_t>(file.header.size());
  for (size_t k = 0; k < group.size(); ++k) {
    const int64_t bytes = placed[k].end - placed[k].begin;
    plan.tensors[group[k]] = {
        static_cast<int64_t>(plan.files.size()),
        static_cast<int64_t>(file.header.size()) + placed[k].begin, bytes};
    file.bytes += bytes;
  }
  return file;
}

}  // namespace

absl::Status CheckPlainFileName(absl::string_view name) {
  if (IsPlainFileName(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("\"", absl::Utf8SafeCEscape(name.substr(0, kMaxNameBytes)),
                   "\" is no name of a file in the checkpoint's own folder"));
}

absl::StatusOr<FilePlan> PlanFiles(absl::Span<const TensorInfo> tensors,
                                   absl::string_view stem,
                                   int64_t max_file_bytes) {
  FilePlan plan;
  int64_t total_bytes = 0;
  std::vector<int64_t> bytes(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(bytes[i], BytesOf(tensors[i]));
    if (__builtin_add_overflow(total_bytes, bytes[i], &total_bytes)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors up to \"", tensors[i].name,
                       "\" have more bytes than 64 bits count"));
    }
  }
  const auto groups = Group(bytes, max_file_bytes);
  plan.tensors.resize(tensors.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    FSDP_ASSIGN_OR_RETURN(PlannedFile file, PlanFile(tensors, groups[i], plan));
    file.name = groups.size() == 1
                    ? absl::StrCat(stem, ".safetensors")
                    : absl::StrFormat("%s-%05d-of-%05d.safetensors", stem,
                                      i + 1, groups.size());
    FSDP_RETURN_IF_ERROR(CheckPlainFileName(file.name));
    plan.files.push_back(std::move(file));
  }
  if (groups.size() > 1) {
    plan.files.push_back(
        WholeFile(absl::StrCat(stem, ".safetensors.index.json"),
                  FormatIndex(tensors, plan, total_bytes)));
  }
  return plan;
}

namespace {

// Values of each member but the tensors; no index has nearly as many.
constexpr int64_t kMaxValues = 10'000;

// Some writers print the total as 1e9 or 1000000000.0.
absl::Status CheckTotal(const Json& metadata) {
  const Json* const total = metadata.Find("total_size");
  if (total == nullptr || *total == Json()) return absl::OkStatus();
  constexpr double kMost = 9e18;
  const double value = total->NumberOr(-1);
  if (value >= 0 && value < kMost && value == std::floor(value)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "an index of files whose metadata.total_size is ",
      total->ToString().substr(0, 100), ", not a number of bytes"));
}

absl::StatusOr<std::string> FileOf(absl::string_view tensor,
                                   const Json& value) {
  const std::string* file = value.As<std::string>();
  if (file == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("an index of files that has no file for tensor \"", tensor,
                     "\", but ", value.ToString().substr(0, 100)));
  }
  FSDP_RETURN_IF_ERROR(
      Annotate(CheckPlainFileName(*file),
               absl::StrCat("an index of files, tensor \"", tensor, "\"")));
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
    has_weights |= name == "weight_map" && value.As<Json::Object>() != nullptr;
    return name == "metadata" ? CheckTotal(value) : absl::OkStatus();
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

namespace {

// One file has these, side by side.
struct Contents {
  std::vector<TensorInfo> infos;
  std::vector<ShardPiece> pieces;
  ShardingInfo sharding;
};

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
      const int64_t end = begin + box.Numel();
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
  FSDP_ASSIGN_OR_RETURN(const auto placed, PlaceTensors(contents.infos));
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

// Returns whether it is one of the numbers of a file's name.
bool IsNumber(absl::string_view text) {
  return text.size() >= 5 && absl::c_all_of(text, absl::ascii_isdigit);
}

}  // namespace

absl::StatusOr<std::vector<ShardFile>> PlanShardFiles(
    int rank, absl::Span<const RankRange> ranges, absl::string_view stem) {
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
  absl::string_view rest = LastPart(name);
  if (!absl::ConsumeSuffix(&rest, ".safetensors")) return std::nullopt;
  // The stem may have '-', too.
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, '-');
  const size_t end = parts.size() - std::min<size_t>(parts.size(), 3);
  const bool is_shard = end > 2 && parts[0] == "shard" && IsNumber(parts[1]) &&
                        IsNumber(parts[end]) && parts[end + 1] == "of" &&
                        IsNumber(parts[end + 2]);
  const std::string stem =
      is_shard ? absl::StrJoin(parts.begin() + 2, parts.begin() + end, "-")
               : "";
  if (stem.empty()) return std::nullopt;
  return absl::StrCat(FolderPart(name), stem);
}

namespace {

constexpr absl::string_view kOffsets = "saved_offsets";
constexpr absl::string_view kTensor = "logical_fqn";
constexpr absl::string_view kShape = "global_shape";
constexpr absl::string_view kPosition = "tensor_position";
constexpr int64_t kMaxEntryValues = 1024;

absl::StatusOr<ShardEntry> ParseEntry(const std::string& name,
                                      const Json& json) {
  ShardEntry entry{name, {}, std::nullopt, std::nullopt};
  const Json* offsets = json.Find(kOffsets);
  if (offsets == nullptr) {
    return absl::InvalidArgumentError("it has no \"saved_offsets\"");
  }
  FSDP_ASSIGN_OR_RETURN(entry.offsets, ParseSizes(kOffsets, *offsets));
  if (const Json* shape = json.Find(kShape)) {
    FSDP_ASSIGN_OR_RETURN(entry.global_shape, ParseSizes(kShape, *shape));
  }
  if (const Json* position = json.Find(kPosition)) {
    const auto* const number = position->As<int64_t>();
    if (number == nullptr || *number < 0) {
      return absl::InvalidArgumentError(
          "\"tensor_position\" is no integer >= 0");
    }
    entry.position = *number;
  }
  if (const Json* tensor = json.Find(kTensor)) {
    if (tensor->As<std::string>() == nullptr) {
      return absl::InvalidArgumentError("\"logical_fqn\" is no string");
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
      json, kMaxEntryValues,
      [&info](const std::string& name, const Json& value) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            info[name],
            Annotate(ParseEntry(name, value),
                     absl::StrCat(kShardingInfoKey, " of \"", name, "\"")));
        return absl::OkStatus();
      }));
  return info;
}

}  // namespace fsdp::checkpoint
