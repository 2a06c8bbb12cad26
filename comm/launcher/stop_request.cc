#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "base/check.h"
#include "comm/launcher/launch_options.h"

namespace fsdp::comm {
namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGUSR1};

// A handler can reach nothing but variables of static storage.
std::atomic<const StopRequest*> current{nullptr};
std::atomic<int> received{0};
std::atomic<int64_t> first_end{0};  // when SIGINT or SIGTERM came; 0: not yet
std::atomic<int64_t> apart_ns{0};
static_assert(std::atomic<int>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free,
              "a signal handler must not take a lock");

int64_t MonotonicNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void Note(int number) {
  int none = 0;
  received.compare_exchange_strong(none, number);
  if (number == SIGUSR1) return;
  const int64_t now = MonotonicNs();
  int64_t first = 0;
  if (first_end.compare_exchange_strong(first, now)) return;
  if (now - first < apart_ns) return;
  signal(number, SIG_DFL);
  raise(number);  // ends the process when this handler returns
}

}  // namespace

StopRequest::StopRequest(absl::Duration period, absl::Duration apart)
    : period_(period) {
  const StopRequest* none = nullptr;
  FSDP_CHECK(current.compare_exchange_strong(none, this));
  received = 0;
  first_end = 0;
  apart_ns = absl::ToInt64Nanoseconds(apart);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    // Launchers start ranks with SIGUSR1 ignored until they handle it.
    const bool is_ignored = previous_[i].sa_handler == SIG_IGN;
    if (is_ignored && kSignals[i] != SIGUSR1) continue;
    struct sigaction note = {};
    note.sa_handler = Note;
    // Interrupted calls on files and sockets go on.
    note.sa_flags = SA_RESTART;
    sigaction(kSignals[i], &note, nullptr);
  }
  // Launchers start ranks with SIGUSR1 blocked.
  sigset_t early;
  sigemptyset(&early);
  sigaddset(&early, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &early, nullptr);
}

StopRequest::~StopRequest() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction now = {};
    sigaction(kSignals[i], nullptr, &now);
    if (now.sa_handler == Note) sigaction(kSignals[i], &previous_[i], nullptr);
  }
  current = nullptr;
}

const StopRequest* StopRequest::Current() { return current; }

int StopRequest::signal() const { return received; }

void IgnoreQuestions() {
  for (const int question : {SIGQUIT, SIGUSR1}) {
    struct sigaction action = {};
    sigaction(question, nullptr, &action);
    const bool has_handler = (action.sa_flags & SA_SIGINFO) != 0;
    if (!has_handler && action.sa_handler == SIG_DFL) signal(question, SIG_IGN);
  }
}

}  // namespace fsdp::comm
