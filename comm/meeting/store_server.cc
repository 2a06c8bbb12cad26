#include "comm/meeting/store_server.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/algorithm/container.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/hmac.h"
#include "base/start_thread.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;
// As pollfd has it: NOLINTNEXTLINE(google-runtime-int)
constexpr short kGone = POLLERR | POLLHUP | POLLRDHUP | POLLNVAL;

}  // namespace

absl::StatusOr<std::unique_ptr<StoreServer>> StoreServer::Start(
    UniqueFd listener, std::string secret, const StoreServerOptions& options) {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    // With fewer files the server serves as many callers as it can.
    setrlimit(RLIMIT_NOFILE, &files);
  }
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  // accept() must not block: the caller may be gone by then.
  const int flags = fcntl(listener.get(), F_GETFL);
  const bool returns =
      flags >= 0 && fcntl(listener.get(), F_SETFL, flags | O_NONBLOCK) == 0;
  if (!wake.is_open() || !returns) {
    return absl::ResourceExhaustedError(
        absl::StrCat("serve the job's store: ", std::strerror(errno)));
  }
  auto server = absl::WrapUnique(new StoreServer(
      std::move(listener), std::move(wake), std::move(secret), options));
  FSDP_ASSIGN_OR_RETURN(server->thread_,
                        StartThread("to serve the job's store",
                                    [self = server.get()] { self->Serve(); }));
  return server;
}

StoreServer::~StoreServer() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  // The counter is far from full.
  FSDP_CHECK(write(wake_.get(), &one, sizeof(one)) ==
             static_cast<ssize_t>(sizeof(one)));
  thread_.join();
}

void StoreServer::Serve() {
  for (;;) {
    std::vector<pollfd> watched = Watched();
    const int ready = poll(watched.data(), watched.size(), PollTimeout());
    if (ready < 0 && errno != EINTR) return;
    if (watched[0].revents != 0) return;
    const absl::Time now = absl::Now();
    accepts_ = true;
    size_t index = 2;
    for (auto caller = callers_.begin(); caller != callers_.end(); ++index) {
      const auto events =
          ready > 0 ? watched[index].revents : decltype(pollfd::revents){0};
      const bool is_late =
          IsStranger(*caller) && now >= caller->came + options_.claim_timeout;
      if (!is_late && Handle(*caller, events)) {
        ++caller;
      } else {
        caller = callers_.erase(caller);
      }
    }
    ResumeWaits();
    if (ready > 0 && watched[1].revents != 0) Accept();
  }
}

std::vector<pollfd> StoreServer::Watched() const {
  std::vector<pollfd> watched;
  watched.reserve(2 + callers_.size());
  watched.push_back({wake_.get(), POLLIN, 0});
  // poll() passes over negative descriptors.
  watched.push_back({accepts_ ? listener_.get() : -1, POLLIN, 0});
  for (const Caller& caller : callers_) {
    auto events = decltype(pollfd::events){POLLRDHUP};
    if (caller.session.has_output()) events |= POLLOUT;
    if (caller.session.wants_input()) events |= POLLIN;
    watched.push_back({caller.fd.get(), events, 0});
  }
  return watched;
}

int StoreServer::PollTimeout() const {
  absl::Time next = absl::InfiniteFuture();
  for (const Caller& caller : callers_) {
    if (IsStranger(caller)) {
      next = std::min(next, accepts_ ? caller.came + options_.claim_timeout
                                     : DropTime(caller));
    } else if (caller.session.is_waiting()) {
      next = std::min(next, caller.session.wait_deadline());
    }
  }
  return PollMilliseconds(next);
}

void StoreServer::Accept() {
  // The others wait in the listener's queue.
  for (;;) {
    const auto strangers =
        static_cast<size_t>(absl::c_count_if(callers_, IsStranger));
    accepts_ = strangers < options_.max_strangers || DropStranger();
    if (!accepts_) return;
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.is_open()) {
      const bool is_full = errno == EMFILE || errno == ENFILE ||
                           errno == ENOBUFS || errno == ENOMEM;
      if (is_full && DropStranger()) continue;
      // Without a stranger to hang up on, somebody has to leave first.
      accepts_ = !is_full;
      return;
    }
    callers_.push_back(
        {std::move(fd),
         StoreSession(secret_, RandomBytes(kNonceBytes), &table_),
         absl::Now()});
    if (!Write(callers_.back())) callers_.pop_back();
  }
}

bool StoreServer::DropStranger() {
  const auto first = absl::c_find_if(callers_, IsStranger);
  if (first == callers_.end() || absl::Now() < DropTime(*first)) return false;
  callers_.erase(first);
  return true;
}

// NOLINTNEXTLINE(google-runtime-int): as pollfd has it
bool StoreServer::Handle(Caller& caller, short events) {
  if ((events & POLLIN) != 0) {
    if (!Read(caller)) return false;
  } else if ((events & kGone) != 0) {
    return false;
  }
  // The next answer is made when the one before is sent.
  while (caller.session.has_output()) {
    if (!Write(caller)) return false;
    if (caller.session.has_output()) break;
    if (!caller.session.Advance(absl::Now()).ok()) return false;
  }
  return true;
}

bool StoreServer::Read(Caller& caller) {
  char bytes[kReadBytes];
  const ssize_t count = recv(caller.fd.get(), bytes, sizeof(bytes), 0);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  if (count == 0) return false;
  const absl::Status received =
      caller.session.Receive({bytes, static_cast<size_t>(count)}, absl::Now());
  if (absl::IsPermissionDenied(received)) {
    table_.Add(kRefusalsKey, 1).IgnoreError();
  }
  return received.ok();
}

bool StoreServer::Write(Caller& caller) {
  std::string& output = caller.session.output();
  const ssize_t count =
      send(caller.fd.get(), output.data(), output.size(), MSG_NOSIGNAL);
  if (count < 0) return errno == EAGAIN || errno == EINTR;
  output.erase(0, static_cast<size_t>(count));
  return true;
}

void StoreServer::ResumeWaits() {
  const absl::Time now = absl::Now();
  // A caller that goes on may set further keys.
  for (;;) {
    bool any = false;
    for (auto caller = callers_.begin(); caller != callers_.end();) {
      StoreSession& session = caller->session;
      const bool is_over = session.is_waiting() &&
                           (now >= session.wait_deadline() ||
                            table_.Find(session.missing_key()) != nullptr);
      const bool stays = !is_over || (session.Advance(now).ok() &&
                                      Handle(*caller, /*events=*/0));
      any |= is_over;
      caller = stays ? std::next(caller) : callers_.erase(caller);
    }
    if (!any) return;
  }
}

}  // namespace fsdp::comm
