#include "testing/interleavings/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <functional>
#include <utility>

#include "base/check.h"

namespace fsdp::interleavings {
namespace {

constexpr size_t kStackBytes = 1 << 20;

}  // namespace

void Fiber::Unmapper::operator()(void* stack) const {
  munmap(stack, kStackBytes);
}

Fiber::Fiber(std::function<void()> at_end)
    : stack_(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)),
      at_end_(std::move(at_end)) {
  FSDP_CHECK(stack_.get() != MAP_FAILED);
}

Fiber::~Fiber() = default;

void Fiber::Start(std::function<void()> function) {
  function_ = std::move(function);
}

// makecontext() passes integers only: two of them are the pointer.
void Fiber::Enter(unsigned low, unsigned high) {
  const uintptr_t self = uintptr_t{high} << 32 | uintptr_t{low};
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  reinterpret_cast<Fiber*>(self)->Loop();
}

void Fiber::Loop() {
  while (true) {
    // The function is destroyed before somebody starts another one.
    std::exchange(function_, nullptr)();
    at_end_();
  }
}

// Uses a context, which costs system calls, for the first switch only.
void Fiber::Resume() {
  if (has_begun_) longjmp(state_, 1);
  has_begun_ = true;
  FSDP_CHECK(getcontext(&context_) == 0);
  context_.uc_stack.ss_sp = stack_.get();
  context_.uc_stack.ss_size = kStackBytes;
  context_.uc_link = nullptr;
  const auto self = reinterpret_cast<uintptr_t>(this);
  makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::Enter), 2,
              static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
  setcontext(&context_);
}

void Fiber::Switch(jmp_buf* from, Fiber* to) {
  if (setjmp(*from) == 0) to->Resume();
}

void Fiber::Switch(Fiber* from, Fiber* to) {
  if (setjmp(from->state_) == 0) to->Resume();
}

void Fiber::Switch(Fiber* from, jmp_buf* to) {
  if (setjmp(from->state_) == 0) longjmp(*to, 1);
}

}  // namespace fsdp::interleavings
