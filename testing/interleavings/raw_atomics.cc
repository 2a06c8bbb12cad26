#include "testing/interleavings/raw_atomics.h"

namespace fsdp::interleavings {
namespace {

template <typename T>
T* At(uintptr_t address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<T*>(address);
}

template <typename T>
bool RawExchange(uintptr_t address, uint64_t* expected, uint64_t desired) {
  T old = static_cast<T>(*expected);
  const bool done =
      __atomic_compare_exchange_n(At<T>(address), &old, static_cast<T>(desired),
                                  false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  *expected = old;
  return done;
}

}  // namespace

uint64_t RawLoad(uintptr_t address, int bytes) {
  switch (bytes) {
    case 1:
      return __atomic_load_n(At<uint8_t>(address), __ATOMIC_SEQ_CST);
    case 2:
      return __atomic_load_n(At<uint16_t>(address), __ATOMIC_SEQ_CST);
    case 4:
      return __atomic_load_n(At<uint32_t>(address), __ATOMIC_SEQ_CST);
    default:
      return __atomic_load_n(At<uint64_t>(address), __ATOMIC_SEQ_CST);
  }
}

bool RawCompareExchange(uintptr_t address, int bytes, uint64_t* expected,
                        uint64_t desired) {
  switch (bytes) {
    case 1:
      return RawExchange<uint8_t>(address, expected, desired);
    case 2:
      return RawExchange<uint16_t>(address, expected, desired);
    case 4:
      return RawExchange<uint32_t>(address, expected, desired);
    default:
      return RawExchange<uint64_t>(address, expected, desired);
  }
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
