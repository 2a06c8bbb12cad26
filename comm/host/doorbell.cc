#include "comm/host/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <ctime>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace fsdp::comm {
namespace {

// The number of looks at the word per look at the clock.
constexpr int kLooksPerTurn = 64;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void FutexWait(std::atomic<uint32_t>* word, uint32_t value,
               absl::Duration timeout) {
  const timespec relative = absl::ToTimespec(timeout);
  // Every error is a reason to look again: a change, a signal, the time.
  syscall(SYS_futex, word, FUTEX_WAIT, value, &relative, nullptr, 0);
}

}  // namespace

void Doorbell::Ring() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, &count_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::Await(uint32_t seen, absl::Duration spin, absl::Time until) {
  absl::Time now = absl::Now();
  const absl::Time end = std::min(now + spin, until);
  while (now < end) {
    for (int i = 0; i < kLooksPerTurn; ++i) {
      if (Count() != seen) return;
      Pause();
    }
    now = absl::Now();
  }
  if (now >= until) return;
  // This store precedes the kernel's look at the word, as Ring()'s store
  // precedes its look at `sleepers_`: one of the two sees the other.
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  FutexWait(&count_, seen, until - now);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace fsdp::comm
