#include "base/testing/allocations.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> largest{0};
std::atomic<int64_t> held{0};
std::atomic<int64_t> most_held{0};
std::atomic<int64_t> held_at_start{0};

template <typename T>
void Raise(std::atomic<T>& most, T value) {
  T before = most;
  while (value > before && !most.compare_exchange_weak(before, value)) {
  }
}

void Free(void* memory) {
  held -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

void* Allocate(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  Raise(largest, size);
  const auto bytes = static_cast<int64_t>(malloc_usable_size(memory));
  Raise(most_held, held.fetch_add(bytes) + bytes);
  return memory;
}

}  // namespace

void* operator new(size_t size) { return Allocate(size); }
// A sanitizer has an operator of its own, which would not go with our delete.
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return Allocate(size);
}
void operator delete(void* memory) noexcept { Free(memory); }
void operator delete(void* memory, size_t) noexcept { Free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  Free(memory);
}

namespace fsdp::testing {

void Allocations::Start() {
  largest = 0;
  held_at_start = held.load();
  most_held = held_at_start.load();
}

size_t Allocations::Largest() { return largest; }

size_t Allocations::Peak() {
  return static_cast<size_t>(std::max<int64_t>(0, most_held - held_at_start));
}

}  // namespace fsdp::testing
