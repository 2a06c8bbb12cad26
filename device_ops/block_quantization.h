// Floating-point numbers as int8 with one scale for each block of them.
#ifndef DEVICE_OPS_BLOCK_QUANTIZATION_H_
#define DEVICE_OPS_BLOCK_QUANTIZATION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::device_ops {

// The operators are in LibTorch's dispatcher (libtorch_fsdp::quantize_blocks_
// and dequantize_blocks_), for the CPU and, if //device_ops/cuda is linked, for
// CUDA, with the same bits. Tensors have one dimension, or two: rows with their
// own blocks, each contiguous, anywhere in memory. Numbers are float32,
// float64, float16 or bfloat16, values int8, scales float32. Nothing is
// recorded for autograd. Errors are c10::Error; one is a device for which the
// program has no kernels.

// The most numbers of a block: kernels count them with 32 bits.
constexpr int64_t kMaxBlock = int64_t{1} << 30;

// Returns how many blocks, and so scales, `numel` elements have. The last block
// may be shorter.
int64_t NumBlocks(int64_t numel, int64_t block);

// Sets for each block the scale to its largest absolute value / 127, and values
// to in / scale, rounded to the nearest, ties to even. An error is at most half
// a scale, and zero stays zero. A block with a NaN or an infinity, also one
// that exceeds float32, has the scale NaN and comes back as NaN only, so a
// gradient scaler still finds it. Below 1e-36 the scale itself loses bits, or
// all, and then everything becomes zero.
void Quantize(const at::Tensor& in, int64_t block, const at::Tensor& values,
              const at::Tensor& scales);

// Sets out = values * scale, row by row.
void Dequantize(const at::Tensor& out, const at::Tensor& values,
                const at::Tensor& scales, int64_t block);

// Says what to do with the sum of the rows.
struct SumUse {
  double factor = 1;
  bool accumulate = false;  // add to what `out` holds
};

// Sets out[i] = factor * (sum over rows r of values[r][i] * scale), or adds
// that to out[i]. Sums in float32, in the order of the rows, and rounds to the
// dtype of `out` once.
void DequantizeSum(const at::Tensor& out, const at::Tensor& values,
                   const at::Tensor& scales, int64_t block, SumUse use = {});

}  // namespace fsdp::device_ops

#endif  // DEVICE_OPS_BLOCK_QUANTIZATION_H_
