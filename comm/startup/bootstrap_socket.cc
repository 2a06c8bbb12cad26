#include "comm/startup/bootstrap_socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);
// An address that does not answer by then is left for the next one.
constexpr absl::Duration kAttempt = absl::Seconds(3);

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

absl::StatusOr<Addresses> Resolve(const std::string& address, int port) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(address.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("the host name \"", address,
                     "\" cannot be resolved: ", gai_strerror(error)));
  }
  return Addresses(found);
}

absl::StatusOr<int> PortOf(int fd) {
  sockaddr_storage bound = {};
  socklen_t length = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return absl::InternalError(std::strerror(errno));
  }
  // The port lies at the same place in both families.
  return static_cast<int>(
      ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port));
}

absl::Status ListenError(int error, const std::string& address, int port) {
  if (error == EADDRINUSE) {
    return absl::FailedPreconditionError(absl::StrCat(
        "port ", port, " is already in use on this host, which was to serve ",
        address, ":", port,
        " for all ranks; end the program that uses it (ss -ltnp shows it) or "
        "choose another MASTER_PORT"));
  }
  if (error == EACCES) {
    return absl::FailedPreconditionError(
        absl::StrCat("no permission to listen on port ", port,
                     "; choose a MASTER_PORT of at least 1024"));
  }
  return absl::UnavailableError(
      absl::StrCat("cannot listen on port ", port, ": ", std::strerror(error)));
}

// Returns a socket that is bound to `to`, for the ranks that know it by
// `address` and `port`.
absl::StatusOr<UniqueFd> Bind(const sockaddr* to, socklen_t length,
                              const std::string& address, int port) {
  UniqueFd fd(socket(to->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.is_open()) return ListenError(errno, address, port);
  const int on = 1;
  const int off = 0;
  if (to->sa_family == AF_INET6) {
    setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd.get(), to, length) != 0) return ListenError(errno, address, port);
  return fd;
}

// Binds to IPv6 and IPv4 if the host has both.
absl::StatusOr<UniqueFd> BindAll(const std::string& address, int port) {
  sockaddr_in6 any6 = {};
  any6.sin6_family = AF_INET6;
  any6.sin6_addr = in6addr_any;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  absl::StatusOr<UniqueFd> both = Bind(reinterpret_cast<const sockaddr*>(&any6),
                                       sizeof(any6), address, port);
  // Otherwise the host may have no IPv6.
  if (both.ok() || absl::IsFailedPrecondition(both.status())) return both;
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  any.sin_port = htons(static_cast<uint16_t>(port));
  return Bind(reinterpret_cast<const sockaddr*>(&any), sizeof(any), address,
              port);
}

absl::StatusOr<UniqueFd> BindTo(const std::string& address, int port) {
  FSDP_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(address, port));
  return Bind(addresses->ai_addr, addresses->ai_addrlen, address, port);
}

std::string Numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, length, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

// Returns whether the socket talks to itself: the kernel may give a free port
// to the very socket that connects to it.
bool IsOwnEnd(int fd) {
  sockaddr_storage local = {};
  sockaddr_storage remote = {};
  socklen_t length = sizeof(local);
  socklen_t remote_length = sizeof(remote);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&remote),
                     &remote_length) == 0 &&
         length == remote_length && std::memcmp(&local, &remote, length) == 0;
}

std::string LocalAddress(int fd) {
  sockaddr_storage local = {};
  socklen_t length = sizeof(local);
  auto* address = reinterpret_cast<sockaddr*>(&local);
  if (getsockname(fd, address, &length) != 0) return "";
  return Numeric(address, length);
}

absl::StatusOr<Connection> TryConnect(const addrinfo& to, absl::Time deadline) {
  UniqueFd fd(
      socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) return absl::UnavailableError(std::strerror(errno));
  if (connect(fd.get(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) {
      return absl::UnavailableError(std::strerror(errno));
    }
    pollfd ready = {fd.get(), POLLOUT, 0};
    int answered = -1;
    do {
      answered = poll(&ready, 1, PollMilliseconds(deadline));
    } while (answered < 0 && errno == EINTR);
    if (answered <= 0) return absl::UnavailableError("no answer");
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return absl::UnavailableError(std::strerror(error));
  }
  if (IsOwnEnd(fd.get())) {
    return absl::UnavailableError(std::strerror(ECONNREFUSED));
  }
  Route route{LocalAddress(fd.get()), Numeric(to.ai_addr, to.ai_addrlen)};
  return Connection{std::move(fd), std::move(route)};
}

absl::StatusOr<Connection> TryAll(const std::string& address, int port,
                                  absl::Time deadline) {
  FSDP_ASSIGN_OR_RETURN(const Addresses addresses, Resolve(address, port));
  absl::Status last;
  for (const addrinfo* to = addresses.get(); to != nullptr; to = to->ai_next) {
    absl::StatusOr<Connection> connection =
        TryConnect(*to, std::min(deadline, absl::Now() + kAttempt));
    if (connection.ok()) return connection;
    last = connection.status();
  }
  return last;
}

}  // namespace

absl::StatusOr<Listener> Listen(const std::string& address, int port) {
  FSDP_ASSIGN_OR_RETURN(UniqueFd fd, IsLoopback(address)
                                         ? BindTo(address, port)
                                         : BindAll(address, port));
  if (listen(fd.get(), SOMAXCONN) != 0) {
    return ListenError(errno, address, port);
  }
  FSDP_ASSIGN_OR_RETURN(const int bound, PortOf(fd.get()));
  return Listener{std::move(fd), bound};
}

absl::StatusOr<Listener> AdoptListener(int fd, int port) {
  int listens = 0;
  socklen_t length = sizeof(listens);
  const bool is_listener =
      getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 &&
      listens != 0;
  if (!is_listener || PortOf(fd).value_or(0) != port) {
    return absl::FailedPreconditionError(
        absl::StrCat("descriptor ", fd, " does not listen on port ", port));
  }
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Listener{UniqueFd(fd), port};
}

absl::StatusOr<Connection> ConnectTo(const std::string& address, int port,
                                     const WaitLimits& limits) {
  for (;;) {
    absl::StatusOr<Connection> connection =
        TryAll(address, port, limits.deadline);
    if (connection.ok()) return connection;
    if (limits.stopped()) {
      return absl::CancelledError(absl::StrCat(
          "asked to stop while nobody answered at ", address, ":", port));
    }
    if (limits.now() + kRetryDelay >= limits.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("nobody answers at ", address, ":", port, ": ",
                       connection.status().message()));
    }
    absl::SleepFor(kRetryDelay);
  }
}

int PollMilliseconds(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return -1;
  const int64_t left = absl::ToInt64Milliseconds(
      absl::Ceil(deadline - absl::Now(), absl::Milliseconds(1)));
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

bool IsLoopback(const std::string& address) {
  return address == "localhost" || address == "::1" ||
         absl::StartsWith(address, "127.");
}

}  // namespace fsdp::comm
