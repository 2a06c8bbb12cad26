#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/start_thread.h"
#include "base/status_macros.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/inspection/peer_records.h"

namespace fsdp::comm {
namespace {

// SIGUSR1 is taken only if it is free: job schedulers may use it.
constexpr std::array<int, 2> kSignals = {SIGQUIT, SIGUSR1};

// A handler can reach nothing but variables of static storage.
std::atomic<int> asked_fd{-1};
static_assert(std::atomic<int>::is_always_lock_free,
              "a signal handler must not take a lock");

void Ask(int /*signal*/) {
  const int error = errno;
  const uint64_t one = 1;
  // If the counter is full, somebody has asked already.
  const ssize_t written = write(asked_fd, &one, sizeof(one));
  static_cast<void>(written);
  errno = error;
}

// Returns whether the program has no handler. An ignored SIGQUIT is not the
// program's wish: shells start background jobs with it.
bool IsFree(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 &&
         (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
}

}  // namespace

absl::StatusOr<std::unique_ptr<InspectionSignals>> InspectionSignals::Install(
    const std::string& folder) {
  std::unique_ptr<InspectionSignals> signals(new InspectionSignals(folder));
  FSDP_RETURN_IF_ERROR(signals->Start());
  return signals;
}

absl::Status InspectionSignals::Start() {
  sigaction(SIGQUIT, nullptr, &previous_[0]);
  if (!IsFree(previous_[0])) {
    return absl::FailedPreconditionError(
        "the program has a handler for SIGQUIT, which stays: the signal does "
        "not show what this rank is doing");
  }
  fd_ = eventfd(0, EFD_CLOEXEC);
  if (fd_ < 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot make an eventfd: ", std::strerror(errno)));
  }
  FSDP_ASSIGN_OR_RETURN(thread_,
                        StartThread("to answer signals", [this] { Answer(); }));
  asked_fd = fd_;
  struct sigaction ask = {};
  ask.sa_handler = Ask;
  // Interrupted calls on files and sockets go on.
  ask.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    taken_[i] = IsFree(previous_[i]);
    if (taken_[i]) sigaction(kSignals[i], &ask, nullptr);
  }
  // Launchers start ranks with SIGUSR1 blocked.
  sigset_t early;
  sigemptyset(&early);
  sigaddset(&early, SIGUSR1);
  pthread_sigmask(SIG_UNBLOCK, &early, nullptr);
  return absl::OkStatus();
}

InspectionSignals::~InspectionSignals() {
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction now = {};
    sigaction(kSignals[i], nullptr, &now);
    if (taken_[i] && now.sa_handler == Ask) {
      sigaction(kSignals[i], &previous_[i], nullptr);
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  if (thread_.joinable()) {
    const uint64_t one = 1;
    const ssize_t written = write(fd_, &one, sizeof(one));
    static_cast<void>(written);
    thread_.join();
  }
  // The descriptor stays open: a handler may be about to write.
  if (fd_ >= 0) asked_fd = -1;
}

void InspectionSignals::Show(const Communicator& ranks) {
  absl::MutexLock lock(&mutex_);
  activity_ = ranks.activity();
  rank_ = ranks.rank();
}

void InspectionSignals::Answer() {
  while (true) {
    uint64_t asked = 0;
    if (read(fd_, &asked, sizeof(asked)) < 0) {
      if (errno == EINTR) continue;
      return;
    }
    std::shared_ptr<RankActivity> activity;
    int rank = 0;
    {
      absl::MutexLock lock(&mutex_);
      if (ending_) return;
      activity = activity_;
      rank = rank_;
    }
    if (activity == nullptr) {
      WriteWhole(STDERR_FILENO, absl::StrCat("fsdp: process ", getpid(),
                                             " has not connected yet\n"));
      continue;
    }
    Write(rank, absl::StrCat("fsdp: ", activity->Describe()));
  }
}

void InspectionSignals::Write(int rank, const std::string& text) const {
  if (folder_.empty()) {
    WriteWhole(STDERR_FILENO, text);
    return;
  }
  const absl::Status written = AppendForRank(folder_, rank, text);
  if (written.ok()) return;
  WriteWhole(STDERR_FILENO,
             absl::StrCat("fsdp: ", written.message(), "\n", text));
}

}  // namespace fsdp::comm
