// The layout of rows for the kernels of block_quantization.h. Strides are in
// elements; a row is contiguous.
#ifndef DEVICE_OPS_ROW_LAYOUT_H_
#define DEVICE_OPS_ROW_LAYOUT_H_

#include <cstdint>

namespace fsdp::device_ops {

// The shapes are in: [rows, numel], values: [rows, numel], scales: [rows,
// blocks].
struct QuantizedRows {
  int64_t rows;
  int64_t numel;
  int64_t block;
  int64_t in_stride;
  int64_t value_stride;
  int64_t scale_stride;
};

// The shapes are out: [rows, numel], values: [rows, terms, numel], scales:
// [rows, terms, blocks].
struct DequantizedRows {
  int64_t rows;
  int64_t terms;
  int64_t numel;
  int64_t block;
  int64_t out_stride;
  int64_t value_row_stride;
  int64_t value_term_stride;
  int64_t scale_row_stride;
  int64_t scale_term_stride;
};

// Return the layout of tensors of these shapes.
template <typename Tensor>
QuantizedRows RowsOf(const Tensor& in, const Tensor& values,
                     const Tensor& scales, int64_t block) {
  return {in.size(0),   in.size(1),       block,
          in.stride(0), values.stride(0), scales.stride(0)};
}

template <typename Tensor>
DequantizedRows RowsOfSum(const Tensor& out, const Tensor& values,
                          const Tensor& scales, int64_t block) {
  return {out.size(0),     values.size(1),   out.size(1),      block,
          out.stride(0),   values.stride(0), values.stride(1), scales.stride(0),
          scales.stride(1)};
}

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_ROW_LAYOUT_H_
