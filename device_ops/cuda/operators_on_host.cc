// The operators on base/testing's device, by CUDA's kernels compiled for the
// host.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <initializer_list>
#include <vector>

#include "base/testing/fake_device.h"
#include "device_ops/cuda/arguments.h"
#include "device_ops/cuda/block_quantization_kernel.h"
#include "device_ops/cuda/element.h"
#include "device_ops/cuda/fused_layers_kernel.h"
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

void Touch(const char* name, std::initializer_list<at::Tensor> read,
           std::initializer_list<at::Tensor> written) {
  for (const at::Tensor& tensor : read) {
    FakeDevice::Touch(tensor, /*writes=*/false, name);
  }
  for (const at::Tensor& tensor : written) {
    FakeDevice::Touch(tensor, /*writes=*/true, name);
  }
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
  Touch("quantize_blocks_", {in}, {values, scales});
  Check(LaunchQuantize(RowsOf(in, values, scales, block),
                       ElementOf(in.scalar_type()), in.const_data_ptr(),
                       values.mutable_data_ptr<int8_t>(),
                       scales.mutable_data_ptr<float>(), nullptr));
}

void Dequantize(const at::Tensor& out, const at::Tensor& values,
                const at::Tensor& scales, int64_t block, double factor,
                bool accumulate) {
  Touch("dequantize_blocks_", {values, scales}, {out});
  Check(LaunchDequantize(
      RowsOfSum(out, values, scales, block), ElementOf(out.scalar_type()),
      out.mutable_data_ptr(), values.const_data_ptr<int8_t>(),
      scales.const_data_ptr<float>(), factor, accumulate, nullptr));
}

void RotateHalves(const at::Tensor& out, const at::Tensor& x,
                  const at::Tensor& cos, const at::Tensor& sin, bool inverse) {
  Touch("rotate_halves_", {x, cos, sin}, {out});
  Check(LaunchRotate(RotationOf(out, x, cos, sin, inverse),
                     ElementOf(out.scalar_type()), nullptr));
}

void SwiGlu(const at::Tensor& out, const at::Tensor& gate,
            const at::Tensor& up) {
  Touch("swiglu_", {gate, up}, {out});
  Check(LaunchSwiGlu(out.numel(), ElementOf(out.scalar_type()),
                     gate.const_data_ptr(), up.const_data_ptr(),
                     out.mutable_data_ptr(), nullptr));
}

void SwiGluBackward(const at::Tensor& of_gate, const at::Tensor& of_up,
                    const at::Tensor& gradient, const at::Tensor& gate,
                    const at::Tensor& up) {
  Touch("swiglu_backward_", {gradient, gate, up}, {of_gate, of_up});
  Check(LaunchSwiGluBackward(gate.numel(), ElementOf(gate.scalar_type()),
                             gradient.const_data_ptr(), gate.const_data_ptr(),
                             up.const_data_ptr(), of_gate.mutable_data_ptr(),
                             of_up.mutable_data_ptr(), nullptr));
}

void CrossEntropy(const at::Tensor& losses, const at::Tensor& logits,
                  const at::Tensor& targets, int64_t ignored, bool gradient) {
  Touch("cross_entropy_", {targets}, {losses, logits});
  Check(LaunchCrossEntropy(
      logits.size(0), logits.size(1), ElementOf(logits.scalar_type()),
      logits.mutable_data_ptr(), targets.const_data_ptr<int64_t>(), ignored,
      gradient, losses.mutable_data_ptr(), nullptr));
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, PrivateUse1, m) {
  m.impl("pack_", &Pack);
  m.impl("quantize_blocks_", &Quantize);
  m.impl("dequantize_blocks_", &Dequantize);
  m.impl("rotate_halves_", &RotateHalves);
  m.impl("swiglu_", &SwiGlu);
  m.impl("swiglu_backward_", &SwiGluBackward);
  m.impl("cross_entropy_", &CrossEntropy);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
