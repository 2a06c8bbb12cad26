#include "comm/launcher/launcher_stop_request.h"

#include <signal.h>

#include <atomic>

#include "base/check.h"

namespace fsdp::comm {
namespace {

// A handler can reach nothing but variables of static storage.
std::atomic<bool> installed{false};
std::atomic<int> received{0};
static_assert(std::atomic<int>::is_always_lock_free,
              "a signal handler must not take a lock");

void Note(int signal_number) {
  int none = 0;
  received.compare_exchange_strong(none, signal_number);
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
}

void Install(int signal_number, struct sigaction* previous) {
  sigaction(signal_number, nullptr, previous);
  if (previous->sa_handler == SIG_IGN) return;
  struct sigaction note = {};
  note.sa_handler = Note;
  // Files and sockets in use should not notice.
  note.sa_flags = SA_RESTART;
  sigaction(signal_number, &note, nullptr);
}

}  // namespace

StopRequest::StopRequest() {
  FSDP_CHECK(!installed.exchange(true));
  received = 0;
  Install(SIGINT, &previous_int_);
  Install(SIGTERM, &previous_term_);
}

StopRequest::~StopRequest() {
  sigaction(SIGINT, &previous_int_, nullptr);
  sigaction(SIGTERM, &previous_term_, nullptr);
  installed = false;
}

int StopRequest::signal() const { return received; }

}  // namespace fsdp::comm
