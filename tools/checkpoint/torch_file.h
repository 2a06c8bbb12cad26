// Files of torch.save() as catalogs.
#ifndef TOOLS_CHECKPOINT_TORCH_FILE_H_
#define TOOLS_CHECKPOINT_TORCH_FILE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/catalog/catalog.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint::tool {

// Names are the keys on the way to a value, with dots: "model.layer.weight",
// "list.0". The value of a file that is one tensor is "tensor".
struct TorchFile {
  Catalog catalog;                      // of one file
  std::vector<std::string> others;      // names of what is no tensor
  std::vector<std::string> unreadable;  // tensors that are not row-major
};

// Whether the file begins as a zip does. InvalidArgument: it is one of
// torch.save() from before it wrote zips.
absl::StatusOr<bool> IsTorchFile(FileSystem& files, const std::string& path);

// InvalidArgument, naming the file, for what ReadArchive() refuses, and for two
// values of one name.
absl::StatusOr<TorchFile> ReadTorchFile(FileSystem& files,
                                        const std::string& path);

}  // namespace fsdp::checkpoint::tool

#endif  // TOOLS_CHECKPOINT_TORCH_FILE_H_
