// device_ops::LockPages() for base/testing's device.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "base/testing/fake_device.h"

namespace fsdp::device_ops {
namespace {

using ::fsdp::testing::FakeDevice;

bool Lock(const at::Tensor& memory, const at::Tensor& /*like*/) {
  FakeDevice::Pin(memory.mutable_data_ptr(),
                  static_cast<int64_t>(memory.nbytes()));
  return true;
}

void Unlock(const at::Tensor& memory, const at::Tensor& /*like*/) {
  FakeDevice::Unpin(memory.mutable_data_ptr());
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, PrivateUse1, m) {
  m.impl("lock_pages_", &Lock);
  m.impl("unlock_pages_", &Unlock);
}

}  // namespace
}  // namespace fsdp::device_ops
