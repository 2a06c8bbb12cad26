// The layout of rows for the kernels of block_quantization.h. Strides are in
// elements; a row is contiguous.
#ifndef DEVICE_OPS_ROW_LAYOUT_H_
#define DEVICE_OPS_ROW_LAYOUT_H_

#include <cstdint>

namespace fsdp::device_ops {

// The shapes are numbers: [rows, numel], values: [rows, terms, numel], scales:
// [rows, terms, blocks]. Where nothing is summed there is one term.
struct BlockRows {
  int64_t rows;
  int64_t terms;
  int64_t numel;
  int64_t block;
  int64_t number_stride;
  int64_t value_row_stride;
  int64_t value_term_stride;
  int64_t scale_row_stride;
  int64_t scale_term_stride;
};

// Returns the layout of tensors of these shapes, or without `terms`.
template <typename Tensor>
BlockRows RowsOf(const Tensor& numbers, const Tensor& values,
                 const Tensor& scales, int64_t block) {
  const bool has_terms = values.dim() == 3;
  return {numbers.size(0),
          has_terms ? values.size(1) : 1,
          numbers.size(1),
          block,
          numbers.stride(0),
          values.stride(0),
          has_terms ? values.stride(1) : 0,
          scales.stride(0),
          has_terms ? scales.stride(1) : 0};
}

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_ROW_LAYOUT_H_
