// Rows of numbers as bytes: int8 with one scale for each block of a row. What
// an int8 base keeps of a weight.
#ifndef ADAPTERS_INT8_ROWS_H_
#define ADAPTERS_INT8_ROWS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fsdp::adapters {

// One row of `numel` numbers, in bytes:
//   | an int8 for each number | zeros up to a multiple of 4 | float32 scales |
// with a scale for each `block` numbers, of which the last may be fewer. Rows
// are whole by themselves: a file's rows become these without the others.
struct Int8Rows {
  // With blocks of `most` numbers at most, as even as can be: how long a row is
  // tells how many there are, and with that where they begin, so that bytes of
  // other blocks have another shape.
  static Int8Rows Of(int64_t numel, int64_t most);

  int64_t numel = 0;  // at least 1
  int64_t block = 0;  // in [1, device_ops::kMaxBlock]

  int64_t row_bytes() const;
};

// rows [n, numel], floating-point -> uint8 [n, row_bytes()]: as
// device_ops::Quantize() rounds, so that no number is off by more than half of
// its block's scale, 1/254 of the block's largest. A block with a number that
// is not finite has the scale NaN.
at::Tensor Pack(const Int8Rows& layout, const at::Tensor& rows);

// Back, [n, numel] of `dtype`, to which it rounds once.
at::Tensor Unpack(const Int8Rows& layout, const at::Tensor& packed,
                  c10::ScalarType dtype);

// The scales, a view: float32 [n, blocks of a row].
at::Tensor ScalesOf(const Int8Rows& layout, const at::Tensor& packed);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_INT8_ROWS_H_
