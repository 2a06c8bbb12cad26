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
  m.impl("lock_pages_", &LockPagesForCuda);
  m.impl("unlock_pages_", &UnlockPagesForCuda);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
