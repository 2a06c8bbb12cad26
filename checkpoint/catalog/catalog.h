// What a checkpoint has, whatever its format: tensors, and which bytes of which
// files hold which of their elements.
#ifndef CHECKPOINT_CATALOG_CATALOG_H_
#define CHECKPOINT_CATALOG_CATALOG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "checkpoint/tensor/boxes.h"
#include "checkpoint/tensor/tensor_info.h"

namespace fsdp::checkpoint {

struct StoredFile {
  std::string name;   // relative to the checkpoint's folder
  int64_t bytes = 0;  // that it has to have
};

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
struct FileRun {
  int file = 0;
  int64_t offset = 0;  // bytes from the beginning of the file
  int64_t bytes = 0;
  int64_t target = 0;  // bytes from the first element that was asked for

  friend bool operator==(const FileRun& a, const FileRun& b) {
    return a.file == b.file && a.offset == b.offset && a.bytes == b.bytes &&
           a.target == b.target;
  }
};

// A value type; thread-compatible.
class Catalog {
 public:
  // The number of the file. InvalidArgument: a name that leaves the folder or
  // that is there already, a negative size.
  absl::StatusOr<int> AddFile(std::string name, int64_t bytes);

  // InvalidArgument, naming the tensor: a name that is there already, more than
  // 64 dimensions, a box that leaves the tensor or its file, an element that is
  // in no box or in several, and elements that do not fill bytes unless one box
  // has all of them. Boxes without elements are dropped.
  absl::Status AddTensor(StoredTensor tensor);

  absl::Span<const StoredFile> files() const { return files_; }
  // In the order in which they were added.
  absl::Span<const StoredTensor> tensors() const { return tensors_; }
  // Null if there is none.
  const StoredTensor* Find(absl::string_view name) const;

 private:
  std::vector<StoredFile> files_;
  std::vector<StoredTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> file_numbers_;
  absl::flat_hash_map<std::string, size_t> tensor_numbers_;
};

// Where the elements [begin, end) of a tensor of a catalog, row-major, lie: in
// their order, with neighbors joined. One run where one box has whole rows, as
// many as there are rows where boxes cut them. InvalidArgument: elements that
// the tensor does not have, or that do not fill bytes.
absl::StatusOr<std::vector<FileRun>> RunsOf(const StoredTensor& tensor,
                                            int64_t begin, int64_t end);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_CATALOG_CATALOG_H_
