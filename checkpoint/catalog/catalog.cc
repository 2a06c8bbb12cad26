#include "checkpoint/catalog/catalog.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "checkpoint/files/new_path.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t kMaxDimensions = 64;  // as LibTorch has

absl::Status Refuse(const TensorInfo& tensor, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor \"", tensor.name, "\", ", ToString(tensor), ": ", why));
}

// `file` is null where there is none of that number.
absl::Status CheckPlace(const TensorInfo& tensor, const StoredBox& box,
                        const StoredFile* file) {
  const absl::Status status = CheckInBounds(tensor.shape, box);
  if (!status.ok()) return Refuse(tensor, status.message());
  if (file == nullptr) return Refuse(tensor, "a piece of it lies in no file");
  FSDP_ASSIGN_OR_RETURN(const int64_t bytes,
                        BytesOf({tensor.name, tensor.dtype, box.sizes}));
  if (box.offset < 0 || box.offset > file->bytes ||
      bytes > file->bytes - box.offset) {
    return Refuse(tensor, absl::StrCat("a piece of ", bytes, " bytes at byte ",
                                       box.offset, " of ", file->name,
                                       ", which has ", file->bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckWhole(const StoredTensor& tensor) {
  const std::vector<Box> boxes(tensor.boxes.begin(), tensor.boxes.end());
  const absl::Status status = CheckTiles(tensor.info.shape, boxes);
  if (!status.ok()) return Refuse(tensor.info, status.message());
  if (ItemBytes(tensor.info.dtype) == 0 && boxes.size() > 1) {
    return Refuse(tensor.info, "elements that do not fill bytes, in pieces");
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

absl::StatusOr<int> Catalog::AddFile(std::string name, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(CheckRelativePath(name));
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("file ", name, " of ", bytes, " bytes"));
  }
  if (!file_numbers_.emplace(name, files_.size()).second) {
    return absl::InvalidArgumentError(
        absl::StrCat("file ", name, " is given twice"));
  }
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
    const bool known =
        box.file >= 0 && static_cast<size_t>(box.file) < files_.size();
    FSDP_RETURN_IF_ERROR(
        CheckPlace(tensor.info, box, known ? &files_[box.file] : nullptr));
  }
  FSDP_RETURN_IF_ERROR(CheckWhole(tensor));
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

}  // namespace fsdp::checkpoint
