#include "testing/simulation/baton.h"

#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/check.h"

namespace fsdp::simulation {
namespace {

class WakingBaton final : public Baton {
 public:
  WakingBaton() { FSDP_CHECK(sem_init(&given_, /*pshared=*/0, 0) == 0); }
  ~WakingBaton() override { sem_destroy(&given_); }

  void Await() override {
    while (sem_wait(&given_) != 0) FSDP_CHECK(errno == EINTR);
  }
  void GiveTo(Baton& next) override {
    GiveForEver(next);
    Await();
  }
  void GiveForEver(Baton& next) override {
    sem_post(&static_cast<WakingBaton&>(next).given_);
  }
  void Release() override {}

 private:
  sem_t given_;
};

}  // namespace

std::unique_ptr<Baton> MakeWakingBaton() {
  return std::make_unique<WakingBaton>();
}

#if defined(__x86_64__)

// A place where a thread goes on: its stack, which holds what a function has to
// leave as it was, and the base of its thread-local storage.
struct Context {
  void* stack = nullptr;
  void* locals = nullptr;
};

// Goes on at `to`; returns when somebody goes on at `from`.
extern "C" void FsdpSwitchContext(Context* from, const Context* to);
// Makes this place the one to go on at, and says so by `*arrived` = 1, a futex
// that is awaited at most once. The thread sleeps until `*released`, also a
// futex, is 1, and goes on at `here` as it is then.
extern "C" void FsdpParkContext(Context* here, std::atomic<int>* arrived,
                                std::atomic<int>* released);

// 202 is futex(2): 0 waits, 1 wakes.
asm(R"(
.pushsection .text
.macro FSDP_SAVE
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  subq $8, %rsp
  stmxcsr (%rsp)
  fnstcw 4(%rsp)
  movq %rsp, (%rdi)
.endm
.macro FSDP_RESTORE_AND_RETURN
  ldmxcsr (%rsp)
  fldcw 4(%rsp)
  addq $8, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.endm
.type FsdpSwitchContext, @function
FsdpSwitchContext:
  FSDP_SAVE
  movq (%rsi), %rsp
  movq 8(%rsi), %rax
  wrfsbase %rax
  FSDP_RESTORE_AND_RETURN
.size FsdpSwitchContext, . - FsdpSwitchContext
.type FsdpParkContext, @function
FsdpParkContext:
  FSDP_SAVE
  movq %rdi, %rbx
  movq %rdx, %r12
  movl $1, (%rsi)
  movq %rsi, %rdi
  movl $1, %esi
  movl $1, %edx
  movl $202, %eax
  syscall
1:
  cmpl $0, (%r12)
  jne 2f
  movq %r12, %rdi
  xorl %esi, %esi
  xorl %edx, %edx
  xorl %r10d, %r10d
  movl $202, %eax
  syscall
  jmp 1b
2:
  movq (%rbx), %rsp
  FSDP_RESTORE_AND_RETURN
.size FsdpParkContext, . - FsdpParkContext
.popsection
)");

namespace {

class SwitchingBaton final : public Baton {
 public:
  void Await() override {
    context_.locals = Locals();
    FsdpParkContext(&context_, &arrived_, &released_);
  }
  void GiveTo(Baton& next_baton) override {
    auto& next = static_cast<SwitchingBaton&>(next_baton);
    context_.locals = Locals();
    arrived_.store(1, std::memory_order_relaxed);
    next.AwaitArrival();
    FsdpSwitchContext(&context_, &next.context_);
  }
  void GiveForEver(Baton& next) override { GiveTo(next); }
  void Release() override {
    released_ = 1;
    syscall(SYS_futex, &released_, FUTEX_WAKE, 1);
  }

 private:
  // In glibc the thread's descriptor is at the base of fs.
  static void* Locals() {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    return reinterpret_cast<void*>(pthread_self());
  }

  void AwaitArrival() {
    while (arrived_ == 0) syscall(SYS_futex, &arrived_, FUTEX_WAIT, 0, nullptr);
  }

  Context context_;
  std::atomic<int> arrived_{0};
  std::atomic<int> released_{0};
};

}  // namespace

// Programs may set the base of fs since Linux 5.9.
bool CanSwitchStacks() {
  constexpr uint64_t kFsgsbase = 2;
  return (getauxval(AT_HWCAP2) & kFsgsbase) != 0;
}

std::unique_ptr<Baton> MakeSwitchingBaton() {
  FSDP_CHECK(CanSwitchStacks());
  return std::make_unique<SwitchingBaton>();
}

#else

bool CanSwitchStacks() { return false; }

std::unique_ptr<Baton> MakeSwitchingBaton() {
  FSDP_CHECK(CanSwitchStacks());
  return nullptr;
}

#endif

}  // namespace fsdp::simulation
