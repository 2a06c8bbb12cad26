#include "comm/gloo/sigpipe_block.h"

#include <signal.h>
#include <time.h>

namespace fsdp::comm {
namespace {

sigset_t OnlySigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

}  // namespace

SigpipeBlock::SigpipeBlock() {
  sigset_t pending;
  sigemptyset(&pending);
  sigpending(&pending);
  if (sigismember(&pending, SIGPIPE) == 1) return;
  const sigset_t set = OnlySigpipe();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &set, &before);
  changed_ = sigismember(&before, SIGPIPE) == 0;
}

SigpipeBlock::~SigpipeBlock() {
  if (!changed_) return;
  const sigset_t set = OnlySigpipe();
  // One that came meanwhile is ours; it must not arrive once unblocked.
  const timespec no_wait = {0, 0};
  while (sigtimedwait(&set, nullptr, &no_wait) == SIGPIPE) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace fsdp::comm
