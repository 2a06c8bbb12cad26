// What a tensor in a file looks like.
#ifndef CHECKPOINT_TENSOR_TENSOR_INFO_H_
#define CHECKPOINT_TENSOR_TENSOR_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/tensor/dtype.h"

namespace fsdp::checkpoint {

// Its elements lie row-major, without gaps.
struct TensorInfo {
  std::string name;  // "model.layers.0.self_attn.q_proj.weight"
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;  // () for a scalar; may contain 0

  friend bool operator==(const TensorInfo& a, const TensorInfo& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  }
};

// InvalidArgument, naming the tensor: a negative size, more than int64_t has,
// or sub-byte elements that do not come to whole bytes.
absl::StatusOr<int64_t> NumelOf(const TensorInfo& tensor);
absl::StatusOr<int64_t> BytesOf(const TensorInfo& tensor);

// "BF16[4096, 1024]".
std::string ToString(const TensorInfo& tensor);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_TENSOR_TENSOR_INFO_H_
