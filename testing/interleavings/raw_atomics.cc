#include "testing/interleavings/raw_atomics.h"

namespace fsdp::interleavings {
namespace {

template <typename T>
T* At(uintptr_t address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<T*>(address);
}

// Calls `function` with a zero of that size.
template <typename Function>
auto OfSize(int bytes, const Function& function) {
  switch (bytes) {
    case 1:
      return function(uint8_t{});
    case 2:
      return function(uint16_t{});
    case 4:
      return function(uint32_t{});
    default:
      return function(uint64_t{});
  }
}

}  // namespace

uint64_t RawLoad(uintptr_t address, int bytes) {
  return OfSize(bytes, [=](auto zero) {
    const auto* place = At<decltype(zero)>(address);
    return uint64_t{__atomic_load_n(place, __ATOMIC_SEQ_CST)};
  });
}

bool RawCompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                        uint64_t desired) {
  return OfSize(bytes, [=](auto zero) {
    using T = decltype(zero);
    T old = static_cast<T>(*expected);
    const bool done = __atomic_compare_exchange_n(
        At<T>(address), &old, static_cast<T>(desired), false, __ATOMIC_SEQ_CST,
        __ATOMIC_SEQ_CST);
    *expected = old;
    return done;
  });
}

void RawStore(uintptr_t address, int bytes, uint64_t value) {
  uint64_t old = RawLoad(address, bytes);
  while (!RawCompareExchange(address, bytes, &old, value)) {
  }
}

uint64_t RawUpdate(uintptr_t address, int bytes,
                   uint64_t (*modify)(uint64_t old, uint64_t operand),
                   uint64_t operand) {
  uint64_t old = RawLoad(address, bytes);
  while (!RawCompareExchange(address, bytes, &old, modify(old, operand))) {
  }
  return old;
}

}  // namespace fsdp::interleavings
