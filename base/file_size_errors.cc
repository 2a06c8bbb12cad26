#include "base/file_size_errors.h"

#include <signal.h>
#include <time.h>

namespace fsdp {
namespace {

sigset_t OnlySigxfsz() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  return set;
}

}  // namespace

FileSizeErrors::FileSizeErrors() {
  const sigset_t set = OnlySigxfsz();
  sigset_t previous;
  pthread_sigmask(SIG_BLOCK, &set, &previous);
  was_blocked_ = sigismember(&previous, SIGXFSZ) == 1;
}

FileSizeErrors::~FileSizeErrors() {
  if (was_blocked_) return;
  // The kernel sends it to the thread that writes.
  const sigset_t set = OnlySigxfsz();
  const timespec at_once = {};
  while (sigtimedwait(&set, nullptr, &at_once) == SIGXFSZ) {
  }
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace fsdp
