// Launches the kernels on a stream, without allocating or waiting, so that CUDA
// graphs can hold them; their dtypes and arguments.
#ifndef DEVICE_OPS_CUDA_KERNELS_H_
#define DEVICE_OPS_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device_ops/row_layout.h"

namespace fsdp::device_ops::cuda {

enum class Element : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };

// An argument of the kernel behind Pack().
// Sets out[begin + i] = scale * source[i] for 0 <= i < numel, numel > 0;
// without a source, to `value`, which is not scaled.
struct PackItem {
  const void* source;
  Element element;  // of the source
  int64_t begin;
  int64_t numel;
  float value;
};

// The arguments of the kernel behind RotateHalves(). `x` and `out` are [batch,
// heads, tokens, 2 * half], with strides of the first three in elements; a row
// of the last is contiguous. `cos` and `sin` are [tokens, 2 * half] and
// contiguous. `inverse` is that of libtorch_fsdp::rotate_halves_.
struct RotatedHeads {
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t half;
  int64_t x_strides[3];
  int64_t out_strides[3];
  const void* x;
  const void* cos;
  const void* sin;
  void* out;
  bool inverse;
};

// The most ranges of one launch; they are its arguments, 32 KB at most.
constexpr int kMaxPackItems = 1024;

// Launches the kernel behind Pack(), which writes all items, once for each
// kMaxPackItems.
cudaError_t LaunchPack(const PackItem* items, int64_t count, Element out_type,
                       void* out, double scale, bool accumulate,
                       cudaStream_t stream);

// Launch the kernels behind Quantize() and Dequantize().
cudaError_t LaunchQuantize(const BlockRows& rows, Element in_type,
                           const void* in, int8_t* values, float* scales,
                           cudaStream_t stream);
cudaError_t LaunchDequantize(const BlockRows& rows, Element out_type, void* out,
                             const int8_t* values, const float* scales,
                             double factor, bool accumulate,
                             cudaStream_t stream);

// Launch the kernels behind RotateHalves(), SwiGlu() and CrossEntropyOfRows().
// `type` is that of all numbers; arrays have `numel` of them, or `rows` x
// `classes`, one after the other.
cudaError_t LaunchRotate(const RotatedHeads& heads, Element type,
                         cudaStream_t stream);
cudaError_t LaunchSwiGlu(int64_t numel, Element type, const void* gate,
                         const void* up, void* out, cudaStream_t stream);
cudaError_t LaunchSwiGluBackward(int64_t numel, Element type,
                                 const void* gradient, const void* gate,
                                 const void* up, void* of_gate, void* of_up,
                                 cudaStream_t stream);
// `rows` < 2^31. `losses` are double for Element::kDouble, otherwise float.
cudaError_t LaunchCrossEntropy(int64_t rows, int64_t classes, Element type,
                               void* logits, const int64_t* targets,
                               int64_t ignored, bool gradient, void* losses,
                               cudaStream_t stream);

}  // namespace fsdp::device_ops::cuda

#endif  // DEVICE_OPS_CUDA_KERNELS_H_
