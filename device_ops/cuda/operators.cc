#include "device_ops/cuda/operators.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace fsdp::device_ops::cuda {
namespace {

// Makes the device of the tensors the current one.
class Call {
 public:
  Call(const char* name, at::TensorList /*read*/, at::TensorList written)
      : name_(name), guard_(written.front().device()) {}

  cudaStream_t stream() const {
    return c10::cuda::getCurrentCUDAStream(guard_.current_device().index())
        .stream();
  }
  void Check(cudaError_t error) const {
    // A later launch would find the error and report it as its own.
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    TORCH_CHECK(error == cudaSuccess, name_, ": ", cudaGetErrorString(error));
  }

 private:
  const char* const name_;
  const c10::cuda::CUDAGuard guard_;
};

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
  Operators<Call>::Register(m);
  m.impl("lock_pages_", &LockPagesForCuda);
  m.impl("unlock_pages_", &UnlockPagesForCuda);
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
