// The operators on base/testing's device, by CUDA's kernels compiled for the
// host.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "base/testing/fake_device.h"
#include "device_ops/cuda/operators.h"
#include "device_ops/testing/host_cuda/kernel_machine.h"

namespace fsdp::device_ops::cuda {
namespace {

using ::fsdp::device_ops::testing::KernelMachine;
using ::fsdp::testing::FakeDevice;

class Call {
 public:
  Call(const char* name, at::TensorList read, at::TensorList written) {
    for (const at::Tensor& tensor : read) {
      FakeDevice::Touch(tensor, /*writes=*/false, name);
    }
    for (const at::Tensor& tensor : written) {
      FakeDevice::Touch(tensor, /*writes=*/true, name);
    }
  }

  static cudaStream_t stream() { return nullptr; }
  static void Check(cudaError_t error) {
    TORCH_CHECK(error == cudaSuccess, KernelMachine::Get().failure());
  }
};

TORCH_LIBRARY_IMPL(libtorch_fsdp, PrivateUse1, m) {
  Operators<Call>::Register(m);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
