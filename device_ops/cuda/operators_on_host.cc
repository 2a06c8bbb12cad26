// The operators on base/testing's device, by CUDA's kernels compiled for the
// host.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <vector>

#include "base/testing/fake_device.h"
#include "device_ops/cuda/arguments.h"
#include "device_ops/cuda/block_quantization_kernel.h"
#include "device_ops/cuda/element.h"
#include "device_ops/cuda/pack_kernel.h"
#include "device_ops/row_layout.h"
#include "device_ops/testing/host_cuda/kernel_machine.h"

namespace fsdp::device_ops::cuda {
namespace {

using ::fsdp::device_ops::testing::KernelMachine;
using ::fsdp::testing::FakeDevice;

void Check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, KernelMachine::Get().failure());
}

void Pack(const at::Tensor& out, at::TensorList sources,
          c10::IntArrayRef pieces, c10::IntArrayRef zeros,
          c10::IntArrayRef ones, double scale, bool accumulate) {
  const std::vector<PackItem> items = PackItems(sources, pieces, zeros, ones);
  for (const at::Tensor& source : sources) {
    FakeDevice::Touch(source, /*writes=*/false, "pack_");
  }
  FakeDevice::Touch(out, /*writes=*/true, "pack_");
  Check(LaunchPack(items.data(), static_cast<int64_t>(items.size()),
                   ElementOf(out.scalar_type()), out.mutable_data_ptr(), scale,
                   accumulate, nullptr));
}

void Quantize(const at::Tensor& in, int64_t block, const at::Tensor& values,
              const at::Tensor& scales) {
  FakeDevice::Touch(in, /*writes=*/false, "quantize_blocks_");
  FakeDevice::Touch(values, /*writes=*/true, "quantize_blocks_");
  FakeDevice::Touch(scales, /*writes=*/true, "quantize_blocks_");
  Check(LaunchQuantize(RowsOf(in, values, scales, block),
                       ElementOf(in.scalar_type()), in.const_data_ptr(),
                       values.mutable_data_ptr<int8_t>(),
                       scales.mutable_data_ptr<float>(), nullptr));
}

void Dequantize(const at::Tensor& out, const at::Tensor& values,
                const at::Tensor& scales, int64_t block, double factor,
                bool accumulate) {
  FakeDevice::Touch(values, /*writes=*/false, "dequantize_blocks_");
  FakeDevice::Touch(scales, /*writes=*/false, "dequantize_blocks_");
  FakeDevice::Touch(out, /*writes=*/true, "dequantize_blocks_");
  Check(LaunchDequantize(
      RowsOfSum(out, values, scales, block), ElementOf(out.scalar_type()),
      out.mutable_data_ptr(), values.const_data_ptr<int8_t>(),
      scales.const_data_ptr<float>(), factor, accumulate, nullptr));
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, PrivateUse1, m) {
  m.impl("pack_", &Pack);
  m.impl("quantize_blocks_", &Quantize);
  m.impl("dequantize_blocks_", &Dequantize);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
