// The sockets of process start-up: the one that rank 0 listens on, and how
// other ranks find out that it does.
#ifndef COMM_STARTUP_BOOTSTRAP_SOCKET_H_
#define COMM_STARTUP_BOOTSTRAP_SOCKET_H_

#include <unistd.h>

#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/group/operation_watchdog.h"

// A file descriptor that closes itself.

namespace fsdp::comm {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }

  // Gives the descriptor to the caller.
  int Release() { return std::exchange(fd_, -1); }

  void Reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

struct Listener {
  UniqueFd fd;  // listens already, so that peers may connect; close-on-exec
  int port = 0;
};

// Listens for peers that will connect to `address`: on the loopback interface
// where that is a loopback address, on all interfaces where it is not. Port 0
// takes a free one. FailedPrecondition where the port is in use.
absl::StatusOr<Listener> Listen(const std::string& address, int port);

// Takes over `fd`, inherited from the launcher. FailedPrecondition where it is
// no socket that listens on `port` (any more).
absl::StatusOr<Listener> AdoptListener(int fd, int port);

// The ends of a connection as numeric addresses.
struct Route {
  std::string local;
  std::string remote;
};

struct Connection {
  UniqueFd fd;  // non-blocking, close-on-exec
  Route route;
};

// Connects as soon as somebody listens on `address`:`port`. Errors: as
// WaitUntilReachable().
absl::StatusOr<Connection> ConnectTo(const std::string& address, int port,
                                     const WaitLimits& limits);

// Waits until somebody listens on `address`:`port`. DeadlineExceeded says what
// the last attempt met with; Cancelled: asked to stop.
absl::StatusOr<Route> WaitUntilReachable(const std::string& address, int port,
                                         const WaitLimits& limits);

// What poll() takes as its timeout to return by `deadline`.
int PollMilliseconds(absl::Time deadline);

// Whether `address` is a name or a number of this host's loopback interface.
bool IsLoopback(const std::string& address);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_BOOTSTRAP_SOCKET_H_
