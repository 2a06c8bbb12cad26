#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <vector>

#include "device_ops/cuda/arguments.h"
#include "device_ops/cuda/block_quantization_kernel.h"
#include "device_ops/cuda/element.h"
#include "device_ops/cuda/fused_layers_kernel.h"
#include "device_ops/cuda/pack_kernel.h"
#include "device_ops/row_layout.h"

namespace fsdp::device_ops::cuda {
namespace {

cudaStream_t StreamOf(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

void PackOnCuda(const at::Tensor& out, at::TensorList sources,
                c10::IntArrayRef pieces, c10::IntArrayRef zeros,
                c10::IntArrayRef ones, double scale, bool accumulate) {
  const c10::cuda::CUDAGuard guard(out.device());
  const std::vector<PackItem> items = PackItems(sources, pieces, zeros, ones);
  C10_CUDA_CHECK(LaunchPack(items.data(), static_cast<int64_t>(items.size()),
                            ElementOf(out.scalar_type()),
                            out.mutable_data_ptr(), scale, accumulate,
                            StreamOf(out)));
}

void QuantizeOnCuda(const at::Tensor& in, int64_t block,
                    const at::Tensor& values, const at::Tensor& scales) {
  const c10::cuda::CUDAGuard guard(in.device());
  C10_CUDA_CHECK(LaunchQuantize(
      RowsOf(in, values, scales, block), ElementOf(in.scalar_type()),
      in.const_data_ptr(), values.mutable_data_ptr<int8_t>(),
      scales.mutable_data_ptr<float>(), StreamOf(in)));
}

void DequantizeOnCuda(const at::Tensor& out, const at::Tensor& values,
                      const at::Tensor& scales, int64_t block, double factor,
                      bool accumulate) {
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(LaunchDequantize(
      RowsOfSum(out, values, scales, block), ElementOf(out.scalar_type()),
      out.mutable_data_ptr(), values.const_data_ptr<int8_t>(),
      scales.const_data_ptr<float>(), factor, accumulate, StreamOf(out)));
}

void RotateHalvesOnCuda(const at::Tensor& out, const at::Tensor& x,
                        const at::Tensor& cos, const at::Tensor& sin,
                        bool inverse) {
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(LaunchRotate(RotationOf(out, x, cos, sin, inverse),
                              ElementOf(out.scalar_type()), StreamOf(out)));
}

void SwiGluOnCuda(const at::Tensor& out, const at::Tensor& gate,
                  const at::Tensor& up) {
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(LaunchSwiGlu(out.numel(), ElementOf(out.scalar_type()),
                              gate.const_data_ptr(), up.const_data_ptr(),
                              out.mutable_data_ptr(), StreamOf(out)));
}

void SwiGluBackwardOnCuda(const at::Tensor& of_gate, const at::Tensor& of_up,
                          const at::Tensor& gradient, const at::Tensor& gate,
                          const at::Tensor& up) {
  const c10::cuda::CUDAGuard guard(gate.device());
  C10_CUDA_CHECK(LaunchSwiGluBackward(
      gate.numel(), ElementOf(gate.scalar_type()), gradient.const_data_ptr(),
      gate.const_data_ptr(), up.const_data_ptr(), of_gate.mutable_data_ptr(),
      of_up.mutable_data_ptr(), StreamOf(gate)));
}

void CrossEntropyOnCuda(const at::Tensor& losses, const at::Tensor& logits,
                        const at::Tensor& targets, int64_t ignored,
                        bool gradient) {
  const c10::cuda::CUDAGuard guard(logits.device());
  C10_CUDA_CHECK(LaunchCrossEntropy(
      logits.size(0), logits.size(1), ElementOf(logits.scalar_type()),
      logits.mutable_data_ptr(), targets.const_data_ptr<int64_t>(), ignored,
      gradient, losses.mutable_data_ptr(), StreamOf(logits)));
}

bool LockPagesForCuda(const at::Tensor& memory, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  C10_CUDA_CHECK(cudaHostRegister(memory.mutable_data_ptr(), memory.nbytes(),
                                  cudaHostRegisterPortable));
  return true;
}

void UnlockPagesForCuda(const at::Tensor& memory, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  C10_CUDA_CHECK(cudaHostUnregister(memory.mutable_data_ptr()));
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CUDA, m) {
  m.impl("pack_", &PackOnCuda);
  m.impl("quantize_blocks_", &QuantizeOnCuda);
  m.impl("dequantize_blocks_", &DequantizeOnCuda);
  m.impl("rotate_halves_", &RotateHalvesOnCuda);
  m.impl("swiglu_", &SwiGluOnCuda);
  m.impl("swiglu_backward_", &SwiGluBackwardOnCuda);
  m.impl("cross_entropy_", &CrossEntropyOnCuda);
  m.impl("lock_pages_", &LockPagesForCuda);
  m.impl("unlock_pages_", &UnlockPagesForCuda);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
