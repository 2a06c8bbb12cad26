#include "device_ops/page_lock.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cstdint>

namespace fsdp::device_ops {
namespace {

// The second tensor says for which device.
template <typename Result>
Result Call(const char* name, char* memory, int64_t bytes, c10::Device device) {
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow(name, "")
                      .typed<Result(const at::Tensor&, const at::Tensor&)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(at::from_blob(memory, {bytes}, at::TensorOptions(at::kByte)),
                 at::empty({0}, at::TensorOptions(at::kByte).device(device)));
}

TORCH_LIBRARY_FRAGMENT(libtorch_fsdp, m) {
  m.def("lock_pages_(Tensor(a!) memory, Tensor like) -> bool");
  m.def("unlock_pages_(Tensor(a!) memory, Tensor like) -> ()");
}

TORCH_LIBRARY_IMPL(libtorch_fsdp, CompositeExplicitAutograd, m) {
  m.impl("lock_pages_", [](const at::Tensor& /*memory*/,
                           const at::Tensor& /*like*/) { return false; });
  m.impl("unlock_pages_",
         [](const at::Tensor& /*memory*/, const at::Tensor& /*like*/) {});
}

}  // namespace

bool LockPages(char* memory, int64_t bytes, c10::Device device) {
  return Call<bool>("libtorch_fsdp::lock_pages_", memory, bytes, device);
}

void UnlockPages(char* memory, int64_t bytes, c10::Device device) {
  Call<void>("libtorch_fsdp::unlock_pages_", memory, bytes, device);
}

}  // namespace fsdp::device_ops
