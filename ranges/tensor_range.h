// One rank's range of a named tensor, with its arithmetic. Optimizers, state
// dicts, checkpoints, replicas and adapters share this type.
#ifndef RANGES_TENSOR_RANGE_H_
#define RANGES_TENSOR_RANGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace fsdp {

// Consecutive elements, in storage order, of a tensor that has a name.
struct TensorRange {
  std::string name;            // without wrappers: "blocks.0.qkv.weight"
  std::vector<int64_t> sizes;  // of the whole tensor
  // The strides of the whole tensor, which is dense, give its storage order.
  std::vector<int64_t> strides;
  int64_t begin = 0;  // where the range begins, in elements in storage order
  // The elements: 1-D, maybe empty, maybe resting off the device
  // (fsdp/memory/resting_memory.h). For an optimizer they are a leaf. Writing
  // them changes the parameter, from the next gather on.
  at::Tensor values;
  // The unit that has the parameter. Values of a unit rest together.
  int unit = 0;
  // The index of this rank among the ranks that hold the same range, and their
  // number, which is 1 unless the unit is replicated.
  int replica = 0;
  int replicas = 1;
  // If true, every rank has the whole tensor: `values` have its own shape and
  // layout, which may be any, and `begin` is 0.
  bool is_whole = false;
  // The dtype without mixed precision, as in files and state dicts; unset: that
  // of `values`.
  std::optional<c10::ScalarType> dtype = std::nullopt;

  // The dtype of its elements in files.
  c10::ScalarType file_dtype() const {
    return dtype.has_value() ? *dtype : values.scalar_type();
  }
  // Where the range ends, in elements in storage order.
  int64_t end() const { return begin + values.numel(); }
  // Returns this range with other elements, those of something that is laid out
  // like this tensor, such as a state of an optimizer.
  TensorRange With(at::Tensor elements) const;
  // Returns whether storage order is the order of elements in files.
  bool IsRowMajor() const;
  // Returns the elements from `begin` on as files have them, 1-D and in the
  // same memory, or an undefined tensor if they do not lie so.
  at::Tensor RowMajorValues() const;
};

// Returns a tensor that every rank has; it may be undefined.
TensorRange WholeRange(std::string name, const at::Tensor& tensor);

// Cuts `count` things evenly into `parts`, and returns the range [first,
// second) of part `index`.
std::pair<int64_t, int64_t> EvenPart(int64_t count, int index, int parts);

// Returns the strides of a contiguous tensor of these sizes.
std::vector<int64_t> RowMajorStrides(absl::Span<const int64_t> sizes);

// NotFound, naming the first: no one of `pieces`, which are of one tensor, has
// one of the elements [begin, end).
absl::Status CheckCovered(absl::Span<const TensorRange* const> pieces,
                          int64_t begin, int64_t end);

// Fills the values of `target` from `pieces`, which cover it and are of its
// sizes; pieces that are not whole are of its strides. Throws what LibTorch
// throws.
void CopyFromPieces(absl::Span<const TensorRange* const> pieces,
                    const TensorRange& target);

}  // namespace fsdp

#endif  // RANGES_TENSOR_RANGE_H_
