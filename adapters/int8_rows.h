// Rows of numbers as bytes, int8 with one scale for each block of a row, which
// is how an int8 base keeps its weights.
#ifndef ADAPTERS_INT8_ROWS_H_
#define ADAPTERS_INT8_ROWS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fsdp::adapters {

// One row of `numel` numbers has these bytes:
//   | an int8 for each number | zeros up to a multiple of 4 | float32 scales |
// with a scale for each `block` numbers, the last of which may be fewer. A row
// depends on no other row, so each row of a file can be converted alone.
struct Int8Rows {
  // Returns a layout with even blocks of at most `most` numbers. The length of
  // a row tells its blocks, and so where they begin; rows with other blocks
  // have another shape.
  static Int8Rows Of(int64_t numel, int64_t most);

  int64_t numel = 0;  // at least 1
  int64_t block = 0;  // in [1, device_ops::kMaxBlock]

  int64_t row_bytes() const;
};

// Converts rows [n, numel], floating-point, to uint8 [n, row_bytes()], rounding
// as device_ops::Quantize() does: no number is off by more than half of its
// block's scale, 1/254 of the block's largest. A block with a number that is
// not finite has the scale NaN.
at::Tensor Pack(const Int8Rows& layout, const at::Tensor& rows);

// Converts back to [n, numel], rounding once to `dtype`.
at::Tensor Unpack(const Int8Rows& layout, const at::Tensor& packed,
                  c10::ScalarType dtype);

// Returns a view of the scales, float32 [n, blocks of a row].
at::Tensor ScalesOf(const Int8Rows& layout, const at::Tensor& packed);

// A linear layer whose weight is int8 while nobody computes with it.

// Returns y = x W^T + bias, [..., in] -> [..., out], as at::linear() computes
// it, where W is Unpack(layout, weight) in the dtype of x. Forward and backward
// each make W again and keep neither W nor x, so that one matrix exists at a
// time. The weight gets no gradient; `bias` may be undefined, and gets one if
// it requires it. Throws StatusError (FailedPrecondition) if the weight is not
// such bytes, for example after a module's to(dtype).
at::Tensor Int8Linear(const Int8Rows& layout, const at::Tensor& x,
                      const at::Tensor& weight, const at::Tensor& bias);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_INT8_ROWS_H_
