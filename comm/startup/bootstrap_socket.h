// The sockets of start-up: rank 0 listens on one, and the others connect to it.
#ifndef COMM_STARTUP_BOOTSTRAP_SOCKET_H_
#define COMM_STARTUP_BOOTSTRAP_SOCKET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/output_file.h"
#include "comm/group/operation_watchdog.h"

namespace fsdp::comm {

struct Listener {
  UniqueFd fd;  // listens already, so that peers may connect; close-on-exec
  int port = 0;
};

// Listens for peers that connect to `address`: on the loopback interface if
// that is a loopback address, else on all interfaces. Port 0 takes a free one.
// FailedPrecondition: the port is in use or not permitted.
absl::StatusOr<Listener> Listen(const std::string& address, int port);

// Takes over `fd`, which the launcher has passed on. FailedPrecondition: it is
// not a socket that listens on `port`.
absl::StatusOr<Listener> AdoptListener(int fd, int port);

// The numeric addresses of both ends of a connection.
struct Route {
  std::string local;
  std::string remote;
};

struct Connection {
  UniqueFd fd;  // non-blocking, close-on-exec
  Route route;
};

// Connects as soon as somebody listens on `address`:`port`. DeadlineExceeded
// has the error of the last attempt; Cancelled says that
// `limits.stop_requested` has asked to stop.
absl::StatusOr<Connection> ConnectTo(const std::string& address, int port,
                                     const WaitLimits& limits);

// Returns the timeout, in ms, with which poll() returns by `deadline`; -1 for
// InfiniteFuture().
int PollMilliseconds(absl::Time deadline);

// True for names and numbers of this host's loopback interface.
bool IsLoopback(const std::string& address);

}  // namespace fsdp::comm

#endif  // COMM_STARTUP_BOOTSTRAP_SOCKET_H_
