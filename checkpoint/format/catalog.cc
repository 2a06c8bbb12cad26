#include "checkpoint/format/catalog.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t kMaxDimensions = 64;  // as LibTorch has

absl::Status CheckPlace(const TensorInfo& tensor, const StoredBox& box,
                        const NamedSize& file) {
  const absl::Status status = CheckInBounds(tensor.shape, box);
  if (!status.ok()) return Refuse(tensor, status.message());
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes,
                        BytesOf({tensor.name, tensor.dtype, box.sizes}));
  if (box.offset < 0 || box.offset > file.bytes ||
      bytes > file.bytes - box.offset) {
    return Refuse(tensor, absl::StrCat("a piece of ", bytes, " bytes at byte ",
                                       box.offset, " of ", file.name,
                                       ", which has ", file.bytes));
  }
  return absl::OkStatus();
}

// Both boxes are of one tensor; sizes may be 0 or less where they do not meet.
Box Intersection(const Box& a, const Box& b) {
  Box both = a;
  for (size_t i = 0; i < a.offsets.size(); ++i) {
    both.offsets[i] = std::max(a.offsets[i], b.offsets[i]);
    both.sizes[i] =
        std::min(a.offsets[i] + a.sizes[i], b.offsets[i] + b.sizes[i]) -
        both.offsets[i];
  }
  return both;
}

// The row-major index of a place among `sizes`, relative to `origin`.
int64_t IndexOf(absl::Span<const int64_t> place,
                absl::Span<const int64_t> origin,
                absl::Span<const int64_t> sizes) {
  int64_t index = 0;
  for (size_t i = 0; i < place.size(); ++i) {
    index = index * sizes[i] + place[i] - origin[i];
  }
  return index;
}

// To the next row of `part` in the dimensions before `dims`; false at its end.
bool Advance(const Box& part, size_t dims, std::vector<int64_t>& place) {
  for (size_t i = dims; i-- > 0;) {
    if (++place[i] < part.offsets[i] + part.sizes[i]) return true;
    place[i] = part.offsets[i];
  }
  return false;
}

// Adds the runs of `part`, which is not empty and lies inside of `box`.
void AddRuns(const StoredTensor& tensor, const StoredBox& box, const Box& part,
             int64_t begin, std::vector<FileRun>& runs) {
  const std::vector<int64_t>& shape = tensor.info.shape;
  const int64_t item = ItemBytes(tensor.info.dtype);
  // Dimensions from this one on lie back to back in the tensor, hence in the
  // box too.
  size_t inner = shape.size();
  int64_t count = 1;
  while (inner > 0) {
    --inner;
    count *= part.sizes[inner];
    if (part.sizes[inner] != shape[inner]) break;
  }
  const std::vector<int64_t> zero(shape.size(), 0);
  std::vector<int64_t> place = part.offsets;
  do {
    runs.push_back(
        {{box.file, box.offset + item * IndexOf(place, box.offsets, box.sizes),
          item * count},
         item * (IndexOf(place, zero, shape) - begin)});
  } while (Advance(part, inner, place));
}

// Sorts and joins what is back to back.
std::vector<FileRun> Joined(std::vector<FileRun> runs) {
  std::sort(runs.begin(), runs.end(), [](const FileRun& a, const FileRun& b) {
    return a.target < b.target;
  });
  size_t kept = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    FileRun* last = kept == 0 ? nullptr : &runs[kept - 1];
    if (last != nullptr && last->file == runs[i].file &&
        last->offset + last->bytes == runs[i].offset) {
      last->bytes += runs[i].bytes;
    } else {
      runs[kept++] = runs[i];
    }
  }
  runs.resize(kept);
  return runs;
}

}  // namespace

int Catalog::AddFile(std::string name, int64_t bytes) {
  files_.push_back({std::move(name), bytes});
  return static_cast<int>(files_.size()) - 1;
}

absl::Status Catalog::AddTensor(StoredTensor tensor) {
  FSDP_RETURN_IF_ERROR(BytesOf(tensor.info).status());
  if (tensor.info.shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", tensor.info.name, "\" has ",
                     tensor.info.shape.size(), " dimensions; 64 are possible"));
  }
  for (const StoredBox& box : tensor.boxes) {
    FSDP_RETURN_IF_ERROR(CheckPlace(tensor.info, box, files_[box.file]));
  }
  const std::vector<Box> boxes(tensor.boxes.begin(), tensor.boxes.end());
  const absl::Status whole = CheckTiles(tensor.info.shape, boxes);
  if (!whole.ok()) return Refuse(tensor.info, whole.message());
  if (ItemBytes(tensor.info.dtype) == 0 && boxes.size() > 1) {
    return Refuse(tensor.info, "elements that do not fill bytes, in pieces");
  }
  tensor.boxes.erase(std::remove_if(tensor.boxes.begin(), tensor.boxes.end(),
                                    [](const StoredBox& box) {
                                      return absl::c_linear_search(box.sizes,
                                                                   0);
                                    }),
                     tensor.boxes.end());
  if (!tensor_numbers_.emplace(tensor.info.name, tensors_.size()).second) {
    return Refuse(tensor.info, "is given twice");
  }
  tensors_.push_back(std::move(tensor));
  return absl::OkStatus();
}

const StoredTensor* Catalog::Find(absl::string_view name) const {
  const auto found = tensor_numbers_.find(name);
  return found == tensor_numbers_.end() ? nullptr : &tensors_[found->second];
}

absl::StatusOr<std::vector<FileRun>> RunsOf(const StoredTensor& tensor,
                                            int64_t begin, int64_t end) {
  FSDP_ASSIGN_OR_RETURN(const int64_t numel, NumelOf(tensor.info));
  if (begin < 0 || begin > end || end > numel) {
    return Refuse(tensor.info, absl::StrCat("has no elements ", begin, " to ",
                                            end, ", but ", numel));
  }
  if (ItemBytes(tensor.info.dtype) == 0) {
    return Refuse(tensor.info,
                  "elements that do not fill bytes cannot be read in ranges");
  }
  std::vector<FileRun> runs;
  for (const Box& range : RangeToBoxes(tensor.info.shape, begin, end)) {
    for (const StoredBox& box : tensor.boxes) {
      const Box part = Intersection(range, box);
      const bool is_empty =
          absl::c_any_of(part.sizes, [](int64_t size) { return size <= 0; });
      if (!is_empty) AddRuns(tensor, box, part, begin, runs);
    }
  }
  return Joined(std::move(runs));
}

namespace {

absl::Status Refuse(absl::string_view file, absl::string_view tensor,
                    absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat(file, ", tensor \"", tensor, "\": ", why));
}

int64_t FileBytes(const SafetensorsHeader& header) {
  return header.data_begin +
         (header.tensors.empty() ? 0 : header.tensors.back().end);
}

// The position of tensors that have none.
constexpr int64_t kLast = std::numeric_limits<int64_t>::max();

// A tensor whose pieces are still coming.
struct Growing {
  StoredTensor tensor;  // its shape is as far as pieces reach
  std::optional<std::vector<int64_t>> global_shape;
  int64_t position;
};

class PieceCollector {
 public:
  // If `takes` is not null, those tensors of the file count, which are whole.
  absl::Status AddFile(
      const SafetensorsFile& file,
      const std::function<bool(const std::string& tensor)>& takes = nullptr) {
    const int number = catalog_.AddFile(file.name, FileBytes(file.header));
    const auto found = file.header.metadata.find(std::string(kShardingInfoKey));
    std::optional<ShardingInfo> info;
    if (takes == nullptr && found != file.header.metadata.end()) {
      FSDP_ASSIGN_OR_RETURN(
          info, Annotate(ParseShardingInfo(found->second), file.name));
    }
    for (const PlacedTensor& piece : file.header.tensors) {
      if (takes != nullptr && !takes(piece.info.name)) continue;
      // Without any info it is the whole tensor.
      ShardEntry entry{piece.info.name,
                       std::vector<int64_t>(piece.info.shape.size(), 0),
                       std::nullopt, std::nullopt};
      if (info.has_value()) {
        const auto said = info->find(piece.info.name);
        if (said == info->end()) {
          return Refuse(
              file.name, piece.info.name,
              absl::StrCat("is not in the file's ", kShardingInfoKey));
        }
        entry = said->second;
      }
      StoredBox box{{entry.offsets, piece.info.shape},
                    number,
                    file.header.data_begin + piece.begin};
      FSDP_RETURN_IF_ERROR(AddPiece(file, piece.info, entry, std::move(box)));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<Catalog> Take() {
    std::stable_sort(growing_.begin(), growing_.end(),
                     [](const Growing& a, const Growing& b) {
                       return a.position < b.position;
                     });
    for (Growing& growing : growing_) {
      if (growing.global_shape.has_value()) {
        growing.tensor.info.shape = *std::move(growing.global_shape);
      }
      FSDP_RETURN_IF_ERROR(catalog_.AddTensor(std::move(growing.tensor)));
    }
    return std::move(catalog_);
  }

 private:
  absl::Status AddPiece(const SafetensorsFile& file, const TensorInfo& piece,
                        const ShardEntry& entry, StoredBox box) {
    const auto [found, is_new] =
        numbers_.emplace(entry.tensor, growing_.size());
    if (is_new) {
      const std::vector<int64_t> zero(piece.shape.size(), 0);
      growing_.push_back(
          {{{entry.tensor, piece.dtype, zero}, {}}, entry.global_shape, kLast});
    }
    Growing& growing = growing_[found->second];
    if (!is_new && entry.offsets == growing.tensor.boxes[0].offsets &&
        growing.tensor.boxes[0].file != box.file) {
      const int other = growing.tensor.boxes[0].file;
      return Refuse(file.name, piece.name,
                    absl::StrCat("is in ", catalog_.files()[other].name,
                                 " as well: name the file that is meant"));
    }
    growing.position =
        std::min(growing.position, entry.position.value_or(growing.position));
    TensorInfo& whole = growing.tensor.info;
    if (piece.dtype != whole.dtype ||
        entry.global_shape != growing.global_shape ||
        piece.shape.size() != whole.shape.size()) {
      return Refuse(file.name, piece.name,
                    "has another dtype, shape or number of dimensions than "
                    "pieces of the same tensor before it");
    }
    if (entry.offsets.size() != piece.shape.size()) {
      return Refuse(file.name, piece.name,
                    absl::StrCat("is ", ToString(piece), ", but at [",
                                 absl::StrJoin(entry.offsets, ", "), "]"));
    }
    for (size_t i = 0; i < piece.shape.size(); ++i) {
      int64_t end = 0;
      if (__builtin_add_overflow(entry.offsets[i], piece.shape[i], &end)) {
        return Refuse(file.name, piece.name, "ends beyond what 64 bits count");
      }
      whole.shape[i] = std::max(whole.shape[i], end);
    }
    growing.tensor.boxes.push_back(std::move(box));
    return absl::OkStatus();
  }

  Catalog catalog_;
  std::vector<Growing> growing_;
  absl::flat_hash_map<std::string, size_t> numbers_;
};

// Looks for what the index names and no file has.
absl::Status FindMissing(const FileIndex& index, const Catalog& catalog) {
  std::vector<std::string> findings;
  absl::flat_hash_set<absl::string_view> there;
  for (const NamedSize& file : catalog.files()) {
    there.insert(file.name);
    if (absl::c_binary_search(index.files, file.name)) continue;
    findings.push_back(
        absl::StrCat("file ", file.name, " is not in the index"));
  }
  for (const std::string& file : index.files) {
    if (there.contains(file)) continue;
    findings.push_back(absl::StrCat("file ", file, " is missing"));
  }
  for (const auto& [tensor, file] : index.weights) {
    if (!there.contains(index.files[file]) || catalog.Find(tensor) != nullptr) {
      continue;
    }
    findings.push_back(absl::StrCat("tensor \"", tensor, "\" is missing in ",
                                    index.files[file]));
  }
  if (findings.empty()) return absl::OkStatus();
  constexpr size_t kShown = 50;  // as many as anybody reads
  const size_t count = findings.size();
  findings.resize(std::min(count, kShown));
  return absl::InvalidArgumentError(absl::StrCat(
      "the index and the files of the model differ: ",
      absl::StrJoin(findings, "; "),
      count > kShown ? absl::StrCat("; and ", count - kShown, " more") : "",
      ". Files are missing, or they are of another model: fetch it again"));
}

}  // namespace

absl::StatusOr<Catalog> CatalogOfSafetensors(
    absl::Span<const SafetensorsFile> files) {
  PieceCollector collector;
  for (const SafetensorsFile& file : files) {
    FSDP_RETURN_IF_ERROR(collector.AddFile(file));
  }
  return collector.Take();
}

absl::StatusOr<Catalog> CatalogOfHuggingFace(
    const FileIndex& index, absl::Span<const SafetensorsFile> files) {
  absl::flat_hash_map<absl::string_view, int> expected;
  for (const auto& [tensor, file] : index.weights) expected[tensor] = file;
  PieceCollector collector;
  for (const SafetensorsFile& file : files) {
    FSDP_RETURN_IF_ERROR(
        collector.AddFile(file, [&](const std::string& tensor) {
          const auto entry = expected.find(tensor);
          return entry != expected.end() &&
                 index.files[entry->second] == file.name;
        }));
  }
  FSDP_ASSIGN_OR_RETURN(Catalog catalog, collector.Take());
  FSDP_RETURN_IF_ERROR(FindMissing(index, catalog));
  return catalog;
}

}  // namespace fsdp::checkpoint
