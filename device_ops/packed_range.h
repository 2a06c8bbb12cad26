// The arguments of libtorch_fsdp::pack_, in the form that its kernels use.
#ifndef DEVICE_OPS_PACKED_RANGE_H_
#define DEVICE_OPS_PACKED_RANGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace fsdp::device_ops {

constexpr size_t kNumbersOfPiece = 4;

// A range of `out`: elements of `source` or a constant for each out[begin + i],
// 0 <= i < numel.
struct PackedRange {
  const void* source;     // null: `value` everywhere
  c10::ScalarType dtype;  // of the source
  int64_t begin;
  int64_t numel;
  double value;
};

// Converts the operator's arguments; leaves out empty ranges.
std::vector<PackedRange> PackedRanges(at::TensorList sources,
                                      c10::IntArrayRef pieces,
                                      c10::IntArrayRef zeros,
                                      c10::IntArrayRef ones);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PACKED_RANGE_H_
