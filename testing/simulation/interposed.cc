// Answers what threads of a simulation ask of the system: the time, chance,
// threads, and Abseil's ways to wait. Linked into a program it is there for all
// of it; for threads that are not tasks it does what was done before.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <ctime>

#include "absl/base/config.h"
#include "absl/base/internal/thread_identity.h"
#include "absl/synchronization/internal/create_thread_identity.h"
#include "absl/synchronization/internal/kernel_timeout.h"
#include "absl/synchronization/internal/waiter.h"
#include "absl/time/time.h"
#include "testing/simulation/simulation.h"

namespace {

using ::absl::base_internal::ThreadIdentity;
using ::absl::synchronization_internal::KernelTimeout;
using ::absl::synchronization_internal::Waiter;
using ::fsdp::simulation::Simulation;
using ::fsdp::simulation::Task;

Waiter& WaiterOf(ThreadIdentity* identity) {
  return *reinterpret_cast<Waiter*>(identity->waiter_state.data);
}

bool IsSteady(clockid_t clock) {
  return clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW ||
         clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME;
}

struct Start {
  Task* task;
  void* (*body)(void*);
  void* argument;
};

void* RunTask(void* start_address) {
  auto* const address = static_cast<Start*>(start_address);
  const Start start = *address;
  delete address;
  Simulation& simulation = *start.task->simulation;
  simulation.BeginTask(start.task);
  void* const result = start.body(start.argument);
  simulation.EndTask(start.task);
  return result;
}

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// Calls of absl::Now() are linked to WrappedNow() (BUILD.bazel); RealNow() is
// the function itself.
#define FSDP_STRING_OF_NAME(name) #name
#define FSDP_STRING_OF(macro) FSDP_STRING_OF_NAME(macro)
#define FSDP_NAME_OF_NOW \
  "_ZN4absl12" FSDP_STRING_OF(ABSL_OPTION_INLINE_NAMESPACE_NAME) "3NowEv"
absl::Time WrappedNow() __asm__("__wrap_" FSDP_NAME_OF_NOW);
absl::Time RealNow() __asm__("__real_" FSDP_NAME_OF_NOW);

absl::Time WrappedNow() {
  const Simulation* const simulation = Simulation::Current();
  return simulation == nullptr ? RealNow() : simulation->Now();
}

// std::random_device of libstdc++ calls this.
unsigned RandomNumber(void* device) __asm__("_ZNSt13random_device9_M_getvalEv");

unsigned RandomNumber(void* device) {
  using Get = unsigned (*)(void*);
  static const auto get = Next<Get>("_ZNSt13random_device9_M_getvalEv");
  Simulation* const simulation = Simulation::Current();
  if (simulation == nullptr) return get(device);
  return static_cast<unsigned>(simulation->Random(uint64_t{1} << 32));
}

extern "C" {

int gettimeofday(timeval* now, void* /*zone*/) noexcept {
  timespec precise;
  const int error = clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return error;
}

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const Simulation* const simulation = Simulation::Current();
  const bool is_wall =
      clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (simulation == nullptr || (!is_wall && !IsSteady(clock))) {
    return static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  }
  const int64_t nanos =
      is_wall ? simulation->wall_nanos() : simulation->steady_nanos();
  now->tv_sec = nanos / 1'000'000'000;
  now->tv_nsec = nanos % 1'000'000'000;
  return 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                   void* (*body)(void*), void* argument) noexcept {
  using Create =
      int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = Next<Create>("pthread_create");
  Simulation* const simulation = Simulation::Current();
  if (simulation == nullptr) return create(thread, attributes, body, argument);
  Task* const task =
      simulation->StartTask(simulation->process_of_new_threads());
  // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): ends the process.
  auto* const start = new Start{task, body, argument};
  const int error = create(thread, attributes, RunTask, start);
  if (error != 0) {
    simulation->RemoveTask(task);
    delete start;
    return error;
  }
  task->thread = *thread;
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  using Join = int (*)(pthread_t, void**);
  static const auto join = Next<Join>("pthread_join");
  Simulation* const simulation = Simulation::Current();
  Task* const task =
      simulation == nullptr ? nullptr : simulation->FindTask(thread);
  if (task == nullptr) return join(thread, result);
  simulation->AwaitTask(task);
  const int error = join(thread, result);
  simulation->RemoveTask(task);
  return error;
}

// Abseil's threads wait for these semaphores only; both are weak symbols there.

void ABSL_INTERNAL_C_SYMBOL(AbslInternalPerThreadSemPost)(
    ThreadIdentity* identity) {
  Simulation* const simulation = Simulation::Current();
  if (simulation != nullptr && simulation->Post(identity)) return;
  WaiterOf(identity).Post();
}

bool ABSL_INTERNAL_C_SYMBOL(AbslInternalPerThreadSemWait)(KernelTimeout limit) {
  ThreadIdentity* const identity =
      absl::synchronization_internal::GetOrCreateCurrentThreadIdentity();
  Simulation* const simulation = Simulation::Current();
  if (simulation == nullptr) return WaiterOf(identity).Wait(limit);
  const absl::Time deadline =
      limit.has_timeout() ? absl::TimeFromTimespec(limit.MakeAbsTimespec())
                          : absl::InfiniteFuture();
  return simulation->AwaitPost(identity, deadline);
}

void ABSL_INTERNAL_C_SYMBOL(AbslInternalSleepFor)(absl::Duration duration) {
  if (Simulation* const simulation = Simulation::Current()) {
    return simulation->Sleep(duration);
  }
  while (duration > absl::ZeroDuration()) {
    const absl::Duration part = std::min(duration, absl::Hours(1));
    timespec left = absl::ToTimespec(part);
    while (nanosleep(&left, &left) != 0) {
    }
    duration -= part;
  }
}

}  // extern "C"
