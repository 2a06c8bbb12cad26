// Element types as PyTorch calls them.
#ifndef CHECKPOINT_TORCH_ARCHIVE_TORCH_DTYPE_H_
#define CHECKPOINT_TORCH_ARCHIVE_TORCH_DTYPE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint {

struct TorchDtype {
  Dtype dtype;
  absl::string_view name;  // "float32", in module torch
  // "FloatStorage", in module torch; "" for those that lie in untyped ones.
  absl::string_view storage;
};

// Null for what PyTorch has no such type for: F4, F6, ...
const TorchDtype* TorchDtypeOf(Dtype dtype);
// By "torch.float32" or "torch.FloatStorage"; null for others.
const TorchDtype* TorchDtypeNamed(absl::string_view global);
const TorchDtype* TorchStorageNamed(absl::string_view global);

// Adds "torch.float32", ... or "torch.FloatStorage", ... to `names`.
void AddTorchDtypeNames(std::vector<std::string>& names);
void AddTorchStorageNames(std::vector<std::string>& names);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TORCH_ARCHIVE_TORCH_DTYPE_H_
