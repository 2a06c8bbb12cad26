// The contents of a checkpoint of any format: its tensors, and which bytes of
// which files hold which of their elements.
#ifndef CHECKPOINT_FORMAT_CATALOG_H_
#define CHECKPOINT_FORMAT_CATALOG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "checkpoint/format/file_plan.h"
#include "checkpoint/format/safetensors_header.h"
#include "checkpoint/format/tensor_info.h"

namespace fsdp::checkpoint {

// A box of a tensor, row-major and without gaps in a file.
struct StoredBox : Box {
  int file = 0;        // in Catalog::files()
  int64_t offset = 0;  // bytes from the beginning of the file
};

struct StoredTensor {
  TensorInfo info;
  std::vector<StoredBox> boxes;  // every element is in exactly one
};

// Elements that lie back to back both in a file and in the tensor.
struct FileRun : FilePlace {
  int64_t target = 0;  // bytes from the first element asked for

  friend bool operator==(const FileRun& a, const FileRun& b) {
    return a.file == b.file && a.offset == b.offset && a.bytes == b.bytes &&
           a.target == b.target;
  }
};

// A value type; thread-compatible.
class Catalog {
 public:
  // Returns the number of the file.
  int AddFile(std::string name, int64_t bytes);

  // Drops boxes without elements. InvalidArgument, naming the tensor: the name
  // is there already; more than 64 dimensions; a box leaves the tensor or its
  // file; an element is in no box or in several; elements do not fill bytes and
  // are not all in one box. Boxes name files that there are.
  absl::Status AddTensor(StoredTensor tensor);

  // Names are relative to the checkpoint's folder.
  absl::Span<const NamedSize> files() const { return files_; }
  // In the order in which they were added.
  absl::Span<const StoredTensor> tensors() const { return tensors_; }
  // Null if there is none.
  const StoredTensor* Find(absl::string_view name) const;

 private:
  std::vector<NamedSize> files_;
  std::vector<StoredTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> tensor_numbers_;
};

// Returns where the elements [begin, end), row-major, of a tensor lie, in order
// and with neighbors joined: one run where a box has whole rows, one per row
// where boxes cut rows. InvalidArgument: the tensor lacks the elements, or they
// do not fill bytes.
absl::StatusOr<std::vector<FileRun>> RunsOf(const StoredTensor& tensor,
                                            int64_t begin, int64_t end);

// Makes catalogs of checkpoints of safetensors files from the files' headers.

struct SafetensorsFile {
  std::string name;  // relative to the checkpoint's folder
  SafetensorsHeader header;
};

// Returns the catalog of all files of a folder without index. Tensors are whole
// or, in files with DCP's sharding info, pieces that must make up the tensors.
// They are in the order of their positions if files have these, otherwise of
// the files. Without "global_shape" a tensor is as large as its pieces reach,
// so that a missing last piece goes unnoticed. InvalidArgument names file and
// tensor.
absl::StatusOr<Catalog> CatalogOfSafetensors(
    absl::Span<const SafetensorsFile> files);

// Returns the catalog of a Hugging Face model with an index, whose tensors are
// whole. `files` are those that the index names; other tensors in them are
// ignored, since they may be another file's or older. InvalidArgument lists all
// files that are missing or that the index does not name, and tensors that are
// not in their file.
absl::StatusOr<Catalog> CatalogOfHuggingFace(
    const FileIndex& index, absl::Span<const SafetensorsFile> files);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FORMAT_CATALOG_H_
