#include "comm/meeting/store_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/hmac.h"
#include "base/status_macros.h"
#include "comm/group/wait_limits.h"
#include "comm/meeting/store_message.h"
#include "comm/meeting/store_proof.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {
namespace {

// How often somebody who waits is asked whether to go on.
constexpr absl::Duration kAskAgain = absl::Milliseconds(100);

constexpr char kSecretHint[] =
    "FSDP_JOB_SECRET has to be the same on all ranks, or set on none";

}  // namespace

absl::StatusOr<std::unique_ptr<StoreConnection>> StoreConnection::Open(
    const std::string& address, int port, absl::string_view secret,
    const WaitLimits& limits) {
  FSDP_ASSIGN_OR_RETURN(Connection connection,
                        ConnectTo(address, port, limits));
  auto opened = absl::WrapUnique(new StoreConnection(
      std::move(connection.fd), absl::StrCat(address, ":", port)));
  FSDP_RETURN_IF_ERROR(opened->ShakeHands(secret, limits));
  return opened;
}

absl::Status StoreConnection::ShakeHands(absl::string_view secret,
                                         const WaitLimits& limits) {
  FSDP_ASSIGN_OR_RETURN(const std::string greeting,
                        Receive(kGreetingBytes, limits));
  if (greeting.substr(0, kStoreMagic.size()) != kStoreMagic) {
    return absl::UnavailableError(absl::StrCat(
        "what listens at ", place_,
        " is no store of a job of this library, or of another version of it; "
        "does another program use this port?"));
  }
  const std::string listener_nonce = greeting.substr(kStoreMagic.size());
  const std::string nonce = RandomBytes(kNonceBytes);
  FSDP_RETURN_IF_ERROR(
      Send(absl::StrCat(kStoreMagic, nonce,
                        CallerProof(secret, listener_nonce, nonce)),
           limits));
  const absl::StatusOr<std::string> proof = Receive(kWelcomeBytes, limits);
  if (absl::IsUnavailable(proof.status())) {
    return absl::PermissionDeniedError(
        absl::StrCat("the job's store at ", place_,
                     " takes this process for a stranger: ", kSecretHint));
  }
  FSDP_RETURN_IF_ERROR(proof.status());
  if (SameInConstantTime(*proof,
                         ListenerProof(secret, listener_nonce, nonce))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("what listens at ", place_,
                   " does not know the secret of this job; ", kSecretHint));
}

absl::StatusOr<StoreMessage> StoreConnection::Call(const StoreMessage& ask,
                                                   absl::Time deadline) {
  const WaitLimits limits{deadline};
  FSDP_ASSIGN_OR_RETURN(const std::string frame, EncodeFrame(ask));
  FSDP_RETURN_IF_ERROR(Send(frame, limits));
  for (;;) {
    FSDP_ASSIGN_OR_RETURN(std::optional<StoreMessage> reply, frames_.Next());
    if (!reply.has_value()) {
      char bytes[4096];
      FSDP_ASSIGN_OR_RETURN(const size_t count,
                            ReceiveSome(bytes, sizeof(bytes), limits));
      frames_.Append({bytes, count});
    } else if (reply->code != static_cast<uint8_t>(StoreReply::kRefused)) {
      return *std::move(reply);
    } else {
      return absl::FailedPreconditionError(reply->texts.empty()
                                               ? "refused by the job's store"
                                               : reply->texts[0]);
    }
  }
}

absl::Status StoreConnection::Send(absl::string_view bytes,
                                   const WaitLimits& limits) {
  while (!bytes.empty()) {
    const ssize_t count =
        send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<size_t>(count));
    } else if (errno == EAGAIN) {
      FSDP_RETURN_IF_ERROR(Await(POLLOUT, limits));
    } else if (errno != EINTR) {
      return absl::UnavailableError(absl::StrCat(
          "the job's store at ", place_, " broke off: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> StoreConnection::Receive(size_t count,
                                                     const WaitLimits& limits) {
  std::string bytes(count, '\0');
  size_t done = 0;
  while (done < count) {
    FSDP_ASSIGN_OR_RETURN(const size_t more, ReceiveSome(bytes.data() + done,
                                                         count - done, limits));
    done += more;
  }
  return bytes;
}

absl::StatusOr<size_t> StoreConnection::ReceiveSome(char* bytes, size_t count,
                                                    const WaitLimits& limits) {
  for (;;) {
    const ssize_t got = recv(fd_.get(), bytes, count, 0);
    if (got > 0) return static_cast<size_t>(got);
    if (got < 0 && errno == EAGAIN) {
      FSDP_RETURN_IF_ERROR(Await(POLLIN, limits));
    } else if (got == 0 || errno != EINTR) {
      return absl::UnavailableError(absl::StrCat(
          "the job's store at ", place_, " broke off: ",
          got == 0 ? "closed by who serves it" : std::strerror(errno)));
    }
  }
}

// NOLINTNEXTLINE(google-runtime-int): as pollfd has it
absl::Status StoreConnection::Await(short events,
                                    const WaitLimits& limits) const {
  for (;;) {
    pollfd ready = {fd_.get(), events, 0};
    // Nobody is asked while answers come at once.
    const absl::Time until = std::min(limits.deadline, absl::Now() + kAskAgain);
    if (poll(&ready, 1, PollMilliseconds(until)) > 0) return absl::OkStatus();
    if (limits.stopped()) {
      return absl::CancelledError(absl::StrCat(
          "asked to stop while the job's store at ", place_, " said nothing"));
    }
    if (!limits.passed()) continue;
    return absl::DeadlineExceededError(
        absl::StrCat("the job's store at ", place_,
                     " accepts connections but does not answer; is the "
                     "process that serves it, often rank 0, stopped?"));
  }
}

}  // namespace fsdp::comm
