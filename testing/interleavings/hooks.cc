// Serves a Machine, instead of the sanitizer's runtime, the functions that
// compilers call in code that they instrument for ThreadSanitizer
// (-fsanitize=thread), and library functions that such code calls. The code
// itself is that of production, every access of it is seen, and only the
// machine's shared memory is interfered with.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/time/time.h"
#include "testing/interleavings/machine.h"

using ::fsdp::interleavings::Machine;
using ::fsdp::interleavings::RawCompareExchange;
using ::fsdp::interleavings::RawLoad;
using ::fsdp::interleavings::RawStore;
using ::fsdp::interleavings::RawUpdate;

namespace {

uintptr_t Address(const volatile void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

std::memory_order Order(int order) {
  return static_cast<std::memory_order>(order & 7);
}

void Access(const volatile void* pointer, int64_t bytes, bool writes,
            const void* site) {
  Machine* machine = Machine::Current();
  if (machine == nullptr) return;
  machine->Access(Address(pointer), bytes, writes, Address(site));
}

uint64_t Update(volatile void* pointer, int bytes, Machine::Modify modify,
                uint64_t operand, int order, const void* site) {
  Machine* machine = Machine::Current();
  if (machine == nullptr) {
    return RawUpdate(Address(pointer), bytes, modify, operand);
  }
  return machine->Update(Address(pointer), bytes, modify, operand, Order(order),
                         Address(site));
}

uint64_t Load(const volatile void* pointer, int bytes, int order,
              const void* site) {
  Machine* machine = Machine::Current();
  if (machine == nullptr) return RawLoad(Address(pointer), bytes);
  return machine->Load(Address(pointer), bytes, Order(order), Address(site));
}

void Store(volatile void* pointer, int bytes, uint64_t value, int order,
           const void* site) {
  Machine* machine = Machine::Current();
  if (machine == nullptr) return RawStore(Address(pointer), bytes, value);
  machine->Store(Address(pointer), bytes, value, Order(order), Address(site));
}

bool CompareExchange(volatile void* pointer, int bytes, uint64_t* expected,
                     uint64_t desired) {
  Machine* machine = Machine::Current();
  if (machine == nullptr) {
    return RawCompareExchange(Address(pointer), bytes, expected, desired);
  }
  return machine->CompareExchange(Address(pointer), bytes, expected, desired);
}

uint64_t Set(uint64_t, uint64_t operand) { return operand; }
uint64_t Add(uint64_t old, uint64_t operand) { return old + operand; }
uint64_t Sub(uint64_t old, uint64_t operand) { return old - operand; }
uint64_t And(uint64_t old, uint64_t operand) { return old & operand; }
uint64_t Or(uint64_t old, uint64_t operand) { return old | operand; }
uint64_t Xor(uint64_t old, uint64_t operand) { return old ^ operand; }
uint64_t Nand(uint64_t old, uint64_t operand) { return ~(old & operand); }

}  // namespace

#define SITE __builtin_return_address(0)

// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
// NOLINTBEGIN(google-runtime-int): as compilers and the C library have them.
extern "C" {

void __tsan_init() {}

void __tsan_func_entry(void* caller) {
  Machine* machine = Machine::Current();
  if (machine != nullptr) machine->EnterFunction(Address(caller));
}
void __tsan_func_exit(void*) {
  Machine* machine = Machine::Current();
  if (machine != nullptr) machine->LeaveFunction();
}

// The pointer to a vtable is never in shared memory.
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define PLAIN(read, write, bytes)                                       \
  void __tsan_##read##bytes(void* p) { Access(p, bytes, false, SITE); } \
  void __tsan_##write##bytes(void* p) { Access(p, bytes, true, SITE); }
PLAIN(read, write, 1)
PLAIN(read, write, 2)
PLAIN(read, write, 4)
PLAIN(read, write, 8)
PLAIN(read, write, 16)
PLAIN(unaligned_read, unaligned_write, 2)
PLAIN(unaligned_read, unaligned_write, 4)
PLAIN(unaligned_read, unaligned_write, 8)
PLAIN(unaligned_read, unaligned_write, 16)
#undef PLAIN

void __tsan_read_range(void* p, size_t bytes) {
  Access(p, static_cast<int64_t>(bytes), false, SITE);
}
void __tsan_write_range(void* p, size_t bytes) {
  Access(p, static_cast<int64_t>(bytes), true, SITE);
}

#define UPDATE(bits, type, name, modify)                                   \
  type __tsan_atomic##bits##_##name(volatile type* p, type v, int order) { \
    return static_cast<type>(Update(p, bits / 8, modify, v, order, SITE)); \
  }
#define ATOMIC(bits, type)                                                  \
  type __tsan_atomic##bits##_load(const volatile type* p, int order) {      \
    return static_cast<type>(Load(p, bits / 8, order, SITE));               \
  }                                                                         \
  void __tsan_atomic##bits##_store(volatile type* p, type v, int order) {   \
    Store(p, bits / 8, v, order, SITE);                                     \
  }                                                                         \
  UPDATE(bits, type, exchange, Set)                                         \
  UPDATE(bits, type, fetch_add, Add)                                        \
  UPDATE(bits, type, fetch_sub, Sub)                                        \
  UPDATE(bits, type, fetch_and, And)                                        \
  UPDATE(bits, type, fetch_or, Or)                                          \
  UPDATE(bits, type, fetch_xor, Xor)                                        \
  UPDATE(bits, type, fetch_nand, Nand)                                      \
  int __tsan_atomic##bits##_compare_exchange_strong(                        \
      volatile type* p, type* expected, type v, int, int) {                 \
    uint64_t old = *expected;                                               \
    const bool done = CompareExchange(p, bits / 8, &old, v);                \
    *expected = static_cast<type>(old);                                     \
    return done ? 1 : 0;                                                    \
  }                                                                         \
  type __tsan_atomic##bits##_compare_exchange_val(                          \
      volatile type* p, type expected, type v, int success, int failure) {  \
    __tsan_atomic##bits##_compare_exchange_strong(p, &expected, v, success, \
                                                  failure);                 \
    return expected;                                                        \
  }                                                                         \
  int __tsan_atomic##bits##_compare_exchange_weak(                          \
      volatile type* p, type* expected, type v, int success, int failure) { \
    return __tsan_atomic##bits##_compare_exchange_strong(p, expected, v,    \
                                                         success, failure); \
  }
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
#undef ATOMIC
#undef UPDATE

void __tsan_atomic_thread_fence(int) {
  Machine* machine = Machine::Current();
  if (machine != nullptr) machine->Fence();
}
void __tsan_atomic_signal_fence(int) {}

// The headers of absl::Mutex call these under clang. The machine sees Lock and
// Unlock by its own wrappers.
void __tsan_mutex_create(void*, unsigned) {}
void __tsan_mutex_destroy(void*, unsigned) {}
void __tsan_mutex_pre_lock(void*, unsigned) {}
void __tsan_mutex_post_lock(void*, unsigned, int) {}
int __tsan_mutex_pre_unlock(void*, unsigned) { return 0; }
void __tsan_mutex_post_unlock(void*, unsigned) {}
void __tsan_mutex_pre_signal(void*, unsigned) {}
void __tsan_mutex_post_signal(void*, unsigned) {}
void __tsan_mutex_pre_divert(void*, unsigned) {}
void __tsan_mutex_post_divert(void*, unsigned) {}

// libstdc++ and LibTorch use this one, too, for copies of texts and tensors.
void* memcpy(void* to, const void* from, size_t bytes) noexcept {
  Access(from, static_cast<int64_t>(bytes), false, SITE);
  Access(to, static_cast<int64_t>(bytes), true, SITE);
  return memmove(to, from, bytes);
}

int __real_memcmp(const void* a, const void* b, size_t bytes);
int __wrap_memcmp(const void* a, const void* b, size_t bytes) {
  Access(a, static_cast<int64_t>(bytes), false, SITE);
  Access(b, static_cast<int64_t>(bytes), false, SITE);
  return __real_memcmp(a, b, bytes);
}

void* __real_memset(void* to, int value, size_t bytes);
void* __wrap_memset(void* to, int value, size_t bytes) {
  Access(to, static_cast<int64_t>(bytes), true, SITE);
  return __real_memset(to, value, bytes);
}

// In code that is watched clang calls these instead.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  return memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  return __wrap_memset(to, value, bytes);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  Machine* machine = Machine::Current();
  const auto word = static_cast<uintptr_t>(arguments[0]);
  if (number != SYS_futex || machine == nullptr ||
      !machine->arena().Find(word)) {
    return __real_syscall(number, arguments[0], arguments[1], arguments[2],
                          arguments[3], arguments[4], arguments[5]);
  }
  if (arguments[1] == FUTEX_WAKE) {
    machine->FutexWake(word, Address(SITE));
    return 0;
  }
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  const auto* limit = reinterpret_cast<const timespec*>(arguments[3]);
  machine->FutexWait(
      word, static_cast<uint32_t>(arguments[2]),
      limit == nullptr ? -1 : limit->tv_sec * 1'000'000'000 + limit->tv_nsec,
      Address(SITE));
  return 0;
}

// With one core nobody spins: looking again shows nothing new.
int __real_sched_getaffinity(pid_t pid, size_t size, cpu_set_t* set);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t* set) {
  if (Machine::Current() == nullptr) {
    return __real_sched_getaffinity(pid, size, set);
  }
  CPU_ZERO_S(size, set);
  CPU_SET_S(0, size, set);
  return 0;
}

// These are absl::Now() and absl::Mutex; the library's own calls stay.
#define ABSEIL(release)                                                        \
  __attribute__((weak)) absl::Time __real__ZN4absl##release##3NowEv();         \
  absl::Time __wrap__ZN4absl##release##3NowEv() {                              \
    Machine* machine = Machine::Current();                                     \
    if (machine == nullptr) return __real__ZN4absl##release##3NowEv();         \
    return absl::FromUnixNanos(machine->Now());                                \
  }                                                                            \
  __attribute__((weak)) void __real__ZN4absl##release##5Mutex4LockEv(void*);   \
  void __wrap__ZN4absl##release##5Mutex4LockEv(void* mutex) {                  \
    Machine* machine = Machine::Current();                                     \
    if (machine != nullptr) machine->Lock(mutex);                              \
    __real__ZN4absl##release##5Mutex4LockEv(mutex);                            \
  }                                                                            \
  __attribute__((weak)) void __real__ZN4absl##release##5Mutex6UnlockEv(void*); \
  void __wrap__ZN4absl##release##5Mutex6UnlockEv(void* mutex) {                \
    Machine* machine = Machine::Current();                                     \
    __real__ZN4absl##release##5Mutex6UnlockEv(mutex);                          \
    if (machine != nullptr) machine->Unlock(mutex);                            \
  }
ABSEIL(12lts_20220623)
ABSEIL(12lts_20240116)
#undef ABSEIL

}  // extern "C"
// NOLINTEND(google-runtime-int)
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
