#include "device_ops/page_lock.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace fsdp::device_ops {
namespace {

// Calls an operator on host memory; its second tensor says for which device.
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

#if defined(__x86_64__)

void StreamingCopy(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kLine = 64;
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
  // Only whole lines can be written without being read.
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out) %
                                              static_cast<uintptr_t>(kLine));
  const int64_t head = std::min(bytes, (kLine - past_line) % kLine);
  if (head > 0) std::memcpy(out, in, head);
  int64_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(in + i);
    auto* target = reinterpret_cast<__m128i*>(out + i);
    const __m128i a = _mm_loadu_si128(source);
    const __m128i b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2);
    const __m128i d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  if (i < bytes) std::memcpy(out + i, in + i, bytes - i);
  // The stores must precede those that tell other threads of them.
  _mm_sfence();
}

#else

void StreamingCopy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

#endif

}  // namespace fsdp::device_ops
