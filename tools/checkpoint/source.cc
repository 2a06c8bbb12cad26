#include "tools/checkpoint/source.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "checkpoint/catalog/shard_files.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/load/source_folder.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint::tool {
namespace {

constexpr absl::string_view kEnding = ".safetensors";
constexpr absl::string_view kIndexEnding = ".safetensors.index.json";
constexpr char kModelStem[] = "model";
constexpr absl::string_view kRankFolder = "ranks/";

bool HasName(const std::vector<std::string>& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// "model" for "model-00001-of-00002".
absl::string_view WithoutNumber(absl::string_view stem) {
  constexpr absl::string_view kNumber = "-00001-of-00001";
  if (stem.size() <= kNumber.size()) return stem;
  const absl::string_view end = stem.substr(stem.size() - kNumber.size());
  if (end[0] != '-' || end.substr(6, 4) != "-of-") return stem;
  return stem.substr(0, stem.size() - kNumber.size());
}

// Adds the tensors of `part` under other names.
absl::Status AddCatalog(const Catalog& part, absl::string_view prefix,
                        Catalog& catalog) {
  std::vector<int> numbers;
  for (const StoredFile& file : part.files()) {
    FSDP_ASSIGN_OR_RETURN(numbers.emplace_back(),
                          catalog.AddFile(file.name, file.bytes));
  }
  for (StoredTensor tensor : part.tensors()) {
    tensor.info.name.insert(0, prefix);
    for (StoredBox& box : tensor.boxes) box.file = numbers[box.file];
    FSDP_RETURN_IF_ERROR(catalog.AddTensor(std::move(tensor)));
  }
  return absl::OkStatus();
}

const SumsByName* SumsOf(const Source& source) {
  const bool has_sums = source.manifest.has_value() && !source.unchecked;
  return has_sums ? &source.manifest->files : nullptr;
}

// What stands in front of "-00001-of-00002.safetensors" and the like, once
// where there are files of ranks, but not what is of single ranks.
std::set<std::string> StemsOf(const Manifest& manifest) {
  std::set<std::string> indexed;
  std::set<std::string> stems;
  for (const auto& [name, sums] : manifest.files) {
    if (absl::EndsWith(name, kIndexEnding)) {
      indexed.emplace(absl::StripSuffix(name, kIndexEnding));
    }
  }
  for (const auto& [name, sums] : manifest.files) {
    if (!absl::EndsWith(name, kEnding) || absl::StartsWith(name, kRankFolder)) {
      continue;
    }
    if (std::optional<std::string> of_rank = StemOfShardFile(name)) {
      stems.insert(*std::move(of_rank));
      continue;
    }
    const absl::string_view stem = absl::StripSuffix(name, kEnding);
    const std::string whole(WithoutNumber(stem));
    stems.insert(indexed.count(whole) > 0 ? whole : std::string(stem));
  }
  return stems;
}

bool HasPieces(const Catalog& catalog) {
  const auto& files = catalog.files();
  const auto& tensors = catalog.tensors();
  return std::any_of(files.begin(), files.end(),
                     [](const StoredFile& file) {
                       return absl::StartsWith(file.name, "shard-");
                     }) ||
         std::any_of(tensors.begin(), tensors.end(),
                     [](const StoredTensor& t) { return t.boxes.size() > 1; });
}

absl::Status ReadCheckpoint(const SourceOptions& options, Source& source) {
  source.format = Format::kCheckpoint;
  const SourceFolder folder(*source.files, source.folder, SumsOf(source));
  const std::set<std::string> stems = StemsOf(*source.manifest);
  if (stems.count(kModelStem) == 0) {
    FSDP_ASSIGN_OR_RETURN(source.catalog, folder.ReadModel());
    return absl::OkStatus();
  }
  FSDP_ASSIGN_OR_RETURN(source.catalog, folder.ReadStem(kModelStem));
  for (const std::string& stem : stems) {
    if (options.model_only || stem == kModelStem) continue;
    FSDP_ASSIGN_OR_RETURN(const Catalog part, folder.ReadStem(stem));
    FSDP_RETURN_IF_ERROR(
        AddCatalog(part, absl::StrCat(stem, "/"), source.catalog));
  }
  return absl::OkStatus();
}

absl::Status ReadSafetensors(Source& source) {
  const SourceFolder folder(*source.files, source.folder, nullptr);
  FSDP_ASSIGN_OR_RETURN(source.catalog, folder.ReadModel());
  source.format =
      HasPieces(source.catalog) ? Format::kRankFiles : Format::kHuggingFace;
  return absl::OkStatus();
}

absl::StatusOr<std::string> LatestOf(FileSystem& files,
                                     const std::string& run) {
  FSDP_ASSIGN_OR_RETURN(const auto latest, LatestCheckpoint(files, run));
  if (latest.has_value()) return latest->path;
  return absl::NotFoundError(
      absl::StrCat(run, " has no checkpoint that is whole: see checkpoint ls"));
}

absl::StatusOr<Source> OpenFolder(FileSystem& files, const std::string& path,
                                  const SourceOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, files.List(path));
  if (IsRunFolder(names)) {
    FSDP_ASSIGN_OR_RETURN(const std::string latest, LatestOf(files, path));
    return OpenSource(files, latest, options);
  }
  Source source;
  source.files = &files;
  source.path = path;
  source.folder = path;
  source.unchecked = options.unchecked;
  if (HasName(names, kManifestName)) {
    FSDP_ASSIGN_OR_RETURN(source.manifest, ReadManifest(files, path));
    FSDP_RETURN_IF_ERROR(ReadCheckpoint(options, source));
  } else {
    FSDP_RETURN_IF_ERROR(ReadSafetensors(source));
  }
  return source;
}

absl::StatusOr<Source> OpenFile(FileSystem& files, const std::string& path) {
  const absl::string_view name = LastPart(path);
  Source source;
  source.files = &files;
  source.path = path;
  source.folder = FolderOf(path);
  if (!absl::EndsWith(name, kEnding) && !absl::EndsWith(name, kIndexEnding)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has no name that ends with ", kEnding, " or ", kIndexEnding,
        "; tools/interop/dcp.py makes safetensors of PyTorch's files"));
  }
  const SourceFolder folder(files, source.folder, nullptr);
  FSDP_ASSIGN_OR_RETURN(source.catalog,
                        folder.ReadFileOrIndex(std::string(name)));
  return source;
}

}  // namespace

absl::string_view NameOf(Format format) {
  switch (format) {
    case Format::kCheckpoint:
      return "a checkpoint";
    case Format::kHuggingFace:
      return "a Hugging Face model";
    case Format::kRankFiles:
      break;
  }
  return "safetensors files of single ranks";
}

absl::StatusOr<Source> OpenSource(FileSystem& files, const std::string& path,
                                  const SourceOptions& options) {
  FSDP_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(files, path));
  return is_folder ? OpenFolder(files, path, options) : OpenFile(files, path);
}

bool HasRankFiles(const Source& source) {
  return source.format == Format::kRankFiles ||
         (source.format == Format::kCheckpoint && HasPieces(source.catalog));
}

absl::StatusOr<std::unique_ptr<RangeReader>> ReaderOf(
    const Source& source, RangeReaderOptions options) {
  options.advice = "take another checkpoint, or read it with --unchecked";
  const SourceFolder folder(*source.files, source.folder, SumsOf(source));
  return folder.Open(source.catalog, options);
}

bool IsRunFolder(const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name == kMarkerName || ParseStepName(name).has_value();
  });
}

namespace {

// Of a tensor that is cut in columns: so many bytes are at most so many runs.
constexpr int64_t kWindowBytes = int64_t{4} << 20;

// Joins elements that the reader has cut.
class WholeElements {
 public:
  WholeElements(int64_t item, TakeBytes take)
      : item_(static_cast<size_t>(item)), take_(take) {}

  absl::Status Add(absl::Span<const char> bytes) {
    if (!cut_.empty()) {
      const size_t more = std::min(item_ - cut_.size(), bytes.size());
      cut_.append(bytes.data(), more);
      bytes.remove_prefix(more);
      if (cut_.size() < item_) return absl::OkStatus();
      FSDP_RETURN_IF_ERROR(take_(cut_));
      cut_.clear();
    }
    const size_t whole = bytes.size() / item_ * item_;
    cut_.assign(bytes.data() + whole, bytes.size() - whole);
    return whole > 0 ? take_(bytes.first(whole)) : absl::OkStatus();
  }

 private:
  const size_t item_;
  TakeBytes take_;
  std::string cut_;
};

// Do the elements of the box lie back to back in the tensor?
bool IsOneRun(absl::Span<const int64_t> shape, const Box& box) {
  size_t d = 0;
  while (d < shape.size() && box.sizes[d] == 1) ++d;
  for (++d; d < shape.size(); ++d) {
    if (box.sizes[d] != shape[d]) return false;
  }
  return true;
}

int64_t WindowOf(const StoredTensor& tensor) {
  const bool few_runs = std::all_of(
      tensor.boxes.begin(), tensor.boxes.end(),
      [&](const StoredBox& box) { return IsOneRun(tensor.info.shape, box); });
  return few_runs ? INT64_MAX : kWindowBytes / ItemBytes(tensor.info.dtype);
}

absl::Status ReadRuns(RangeReader& reader, const std::vector<FileRun>& runs,
                      WholeElements& elements) {
  const std::vector<FilePlace> ranges(runs.begin(), runs.end());
  return reader.Read(ranges,
                     [&](size_t, int64_t, absl::Span<const char> bytes) {
                       return elements.Add(bytes);
                     });
}

absl::Status StreamPacked(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(tensor.info));
  std::vector<FileRun> runs;
  runs.reserve(tensor.boxes.size());
  for (const StoredBox& box : tensor.boxes) {
    runs.push_back({{box.file, box.offset, bytes}, 0});
  }
  WholeElements elements(1, take);
  return ReadRuns(reader, runs, elements);
}

}  // namespace

absl::Status StreamElements(RangeReader& reader, const StoredTensor& tensor,
                            int64_t begin, int64_t end, TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  const int64_t item = ItemBytes(tensor.info.dtype);
  if (item == 0 && begin == 0 && end == numel) {
    return StreamPacked(reader, tensor, take);
  }
  // Says what is wrong with the arguments.
  if (item == 0) return RunsOf(tensor, begin, end).status();
  WholeElements elements(item, take);
  const int64_t window = WindowOf(tensor);
  while (begin < end) {
    const int64_t count = std::min(window, end - begin);
    FSDP_ASSIGN_OR_RETURN(const std::vector<FileRun> runs,
                          RunsOf(tensor, begin, begin + count));
    FSDP_RETURN_IF_ERROR(ReadRuns(reader, runs, elements));
    begin += count;
  }
  return absl::OkStatus();
}

absl::Status StreamTensor(RangeReader& reader, const StoredTensor& tensor,
                          TakeBytes take) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  return StreamElements(reader, tensor, 0, numel, take);
}

}  // namespace fsdp::checkpoint::tool
