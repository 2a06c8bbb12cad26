// What libtorch_fsdp::pack_ is asked for, as its kernels go through it.
#ifndef DEVICE_OPS_PACKED_RANGE_H_
#define DEVICE_OPS_PACKED_RANGE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace fsdp::device_ops {

constexpr size_t kNumbersOfPiece = 4;

// out[begin + i] for 0 <= i < numel: from `source`, or a constant.
struct PackedRange {
  const void* source;     // null: `value` everywhere
  c10::ScalarType dtype;  // of the source
  int64_t begin;
  int64_t numel;
  double value;
};

// The arguments as of the operator; empty ranges are left out.
std::vector<PackedRange> PackedRanges(at::TensorList sources,
                                      c10::IntArrayRef pieces,
                                      c10::IntArrayRef zeros,
                                      c10::IntArrayRef ones);

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_PACKED_RANGE_H_
