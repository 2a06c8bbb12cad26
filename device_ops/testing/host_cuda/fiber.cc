#include "device_ops/testing/host_cuda/fiber.h"

#include <cstdint>
#include <utility>

#include "base/check.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FSDP_ADDRESS_SANITIZER
#endif
#if __has_feature(thread_sanitizer)
#define FSDP_THREAD_SANITIZER
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define FSDP_ADDRESS_SANITIZER
#endif
#if defined(__SANITIZE_THREAD__)
#define FSDP_THREAD_SANITIZER
#endif

#if defined(FSDP_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(FSDP_THREAD_SANITIZER)
#include <sanitizer/tsan_interface.h>
#endif

namespace fsdp::device_ops::testing {
namespace {

// The stack has room for a copy of a kernel's arguments, 32 KB at most.
constexpr size_t kStackBytes = 256 << 10;

// Both are inlined: a function that is entered on one stack must not be left on
// another.
__attribute__((always_inline)) inline void BeginSwitch(
    [[maybe_unused]] void** frames_of_leaving,
    [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes,
    [[maybe_unused]] void* thread) {
#if defined(FSDP_ADDRESS_SANITIZER)
  __sanitizer_start_switch_fiber(frames_of_leaving, stack, bytes);
#endif
#if defined(FSDP_THREAD_SANITIZER)
  __tsan_switch_to_fiber(thread, 0);
#endif
}

__attribute__((always_inline)) inline void EndSwitch(
    [[maybe_unused]] void* frames_of_entered,
    [[maybe_unused]] const void** left_stack,
    [[maybe_unused]] size_t* left_bytes) {
#if defined(FSDP_ADDRESS_SANITIZER)
  __sanitizer_finish_switch_fiber(frames_of_entered, left_stack, left_bytes);
#endif
}

}  // namespace

Fiber::Fiber(std::function<void()> body)
    : body_(std::move(body)), stack_(new char[kStackBytes]) {
  FSDP_CHECK(getcontext(&own_) == 0);
  own_.uc_stack.ss_sp = stack_.get();
  own_.uc_stack.ss_size = kStackBytes;
  own_.uc_link = nullptr;
  // makecontext() hands on integers only.
  const auto self = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(this));
  makecontext(&own_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
              static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
#if defined(FSDP_THREAD_SANITIZER)
  own_thread_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(FSDP_THREAD_SANITIZER)
  __tsan_destroy_fiber(own_thread_);
#endif
}

void Fiber::Enter(unsigned high, unsigned low) {
  const uint64_t self = static_cast<uint64_t>(high) << 32 | low;
  // makecontext() passes nothing but ints.
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  auto* const fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(self));
  EndSwitch(nullptr, &fiber->caller_stack_, &fiber->caller_stack_bytes_);
  fiber->body_();
  FSDP_CHECK(false);
}

void Fiber::Resume() {
#if defined(FSDP_THREAD_SANITIZER)
  caller_thread_ = __tsan_get_current_fiber();
#endif
  BeginSwitch(&caller_frames_, stack_.get(), kStackBytes, own_thread_);
  FSDP_CHECK(swapcontext(&caller_, &own_) == 0);
  EndSwitch(caller_frames_, nullptr, nullptr);
}

void Fiber::Yield() {
  BeginSwitch(&own_frames_, caller_stack_, caller_stack_bytes_, caller_thread_);
  FSDP_CHECK(swapcontext(&own_, &caller_) == 0);
  EndSwitch(own_frames_, &caller_stack_, &caller_stack_bytes_);
}

}  // namespace fsdp::device_ops::testing
