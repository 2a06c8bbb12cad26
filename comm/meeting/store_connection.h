// A rank's connection to its job's store.
#ifndef COMM_MEETING_STORE_CONNECTION_H_
#define COMM_MEETING_STORE_CONNECTION_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/group/wait_limits.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/bootstrap_fd.h"

namespace fsdp::comm {

// Used by one thread at a time.
class StoreConnection {
 public:
  // Both ends have shown that they know `secret`. Tries again and again while
  // nobody listens. PermissionDenied: one of them does not, see the text.
  // DeadlineExceeded: nobody listens, or who listens does not answer.
  // Unavailable: what listens is no store of a job. Cancelled: asked to stop.
  static absl::StatusOr<std::unique_ptr<StoreConnection>> Open(
      const std::string& address, int port, absl::string_view secret,
      const WaitLimits& limits);

  // The reply to `ask`, kDone or kNotThere. After an error but
  // FailedPrecondition (refused, see the text) the connection is of no more
  // use. DeadlineExceeded: no answer. Unavailable: it broke off.
  absl::StatusOr<StoreMessage> Call(const StoreMessage& ask,
                                    absl::Time deadline);

 private:
  StoreConnection(UniqueFd fd, std::string place)
      : fd_(std::move(fd)), place_(std::move(place)) {}

  absl::Status ShakeHands(absl::string_view secret, const WaitLimits& limits);
  absl::Status Send(absl::string_view bytes, const WaitLimits& limits);
  // Exactly `count` bytes; Unavailable, with none of it, at the end.
  absl::StatusOr<std::string> Receive(size_t count, const WaitLimits& limits);
  absl::StatusOr<size_t> ReceiveSome(char* bytes, size_t count,
                                     const WaitLimits& limits);
  // Until the socket has one of `events`.
  // NOLINTNEXTLINE(google-runtime-int): as pollfd has it
  absl::Status Await(short events, const WaitLimits& limits) const;

  const UniqueFd fd_;
  const std::string place_;  // "host:29500"
  FrameReader frames_;
};

}  // namespace fsdp::comm

#endif  // COMM_MEETING_STORE_CONNECTION_H_
