#include "comm/meeting/job_store.h"

#include <c10/util/Exception.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/base/thread_annotations.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/hmac.h"
#include "base/status_macros.h"

namespace fsdp::comm {
namespace {

// The time that an answer may take beyond the wait in the store.
constexpr absl::Duration kAnswerTime = absl::Seconds(5);
// The interval at which a waiting caller is asked whether to go on.
constexpr absl::Duration kAskAgain = absl::Milliseconds(100);

constexpr char kSecretHint[] =
    "FSDP_JOB_SECRET has to be the same on all ranks, or set on none";

std::string Text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::vector<uint8_t> Bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

// Checks the reply: even a server that is a rank of the job may be wrong.
const std::string& FirstText(const StoreMessage& reply) {
  TORCH_CHECK_WITH(DistStoreError, !reply.texts.empty(),
                   "the job's store has sent an answer without a value");
  return reply.texts[0];
}

void ThrowUnlessThere(const StoreMessage& reply,
                      const std::vector<std::string>& keys,
                      std::chrono::milliseconds timeout) {
  TORCH_CHECK_WITH(DistStoreError,
                   reply.code != static_cast<uint8_t>(StoreReply::kNotThere),
                   "the job's store has none of it after ", timeout.count(),
                   " ms: ", absl::StrJoin(keys, ", "));
}

}  // namespace

class JobStore::Pool {
 public:
  explicit Pool(JobStorePlace place) : place_(std::move(place)) {}

  absl::Status Open(const WaitLimits& limits) {
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<StoreConnection> connection,
                          Take(limits));
    Return(std::move(connection));
    return absl::OkStatus();
  }

  absl::StatusOr<StoreMessage> Call(const StoreMessage& ask,
                                    absl::Time deadline) {
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<StoreConnection> connection,
                          Take({deadline}));
    absl::StatusOr<StoreMessage> reply = connection->Call(ask, deadline);
    // Any other connection may still get an answer, and is not used again.
    if (reply.ok() || absl::IsFailedPrecondition(reply.status())) {
      Return(std::move(connection));
    }
    return reply;
  }

 private:
  absl::StatusOr<std::unique_ptr<StoreConnection>> Take(
      const WaitLimits& limits) {
    {
      absl::MutexLock lock(&mutex_);
      if (!idle_.empty()) {
        std::unique_ptr<StoreConnection> last = std::move(idle_.back());
        idle_.pop_back();
        return last;
      }
    }
    return StoreConnection::Open(place_.address, place_.port, place_.secret,
                                 limits);
  }

  void Return(std::unique_ptr<StoreConnection> connection) {
    absl::MutexLock lock(&mutex_);
    idle_.push_back(std::move(connection));
  }

  const JobStorePlace place_;
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<StoreConnection>> idle_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<c10::intrusive_ptr<JobStore>> JobStore::Connect(
    const JobStorePlace& place, absl::Duration timeout,
    const WaitLimits& limits) {
  auto pool = std::make_shared<Pool>(place);
  FSDP_RETURN_IF_ERROR(pool->Open(limits));
  return c10::intrusive_ptr<JobStore>::unsafe_steal_from_new(
      new JobStore(std::move(pool), absl::ToChronoMilliseconds(timeout)));
}

c10::intrusive_ptr<c10d::Store> JobStore::clone() {
  return c10::intrusive_ptr<JobStore>::unsafe_steal_from_new(
      new JobStore(pool_, getTimeout()));
}

StoreMessage JobStore::Ask(StoreAsk ask, std::vector<std::string> texts,
                           int64_t number,
                           std::chrono::milliseconds wait) const {
  const absl::Duration limit =
      wait.count() > 0
          ? absl::FromChrono(std::max(wait, getTimeout())) + kAnswerTime
          : absl::FromChrono(getTimeout());
  return ValueOrThrow(
      pool_->Call({static_cast<uint8_t>(ask), number, std::move(texts)},
                  absl::Now() + limit));
}

void JobStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  Ask(StoreAsk::kSet, {key, Text(value)});
}

std::vector<uint8_t> JobStore::compareSet(const std::string& key,
                                          const std::vector<uint8_t>& expected,
                                          const std::vector<uint8_t>& desired) {
  return Bytes(FirstText(
      Ask(StoreAsk::kCompareAndSet, {key, Text(expected), Text(desired)})));
}

std::vector<uint8_t> JobStore::get(const std::string& key) {
  const StoreMessage reply =
      Ask(StoreAsk::kGet, {key}, getTimeout().count(), getTimeout());
  ThrowUnlessThere(reply, {key}, getTimeout());
  return Bytes(FirstText(reply));
}

std::optional<std::string> JobStore::Find(const std::string& key) {
  const StoreMessage reply = Ask(StoreAsk::kGet, {key});
  if (reply.code == static_cast<uint8_t>(StoreReply::kNotThere)) {
    return std::nullopt;
  }
  return FirstText(reply);
}

bool JobStore::Await(const std::string& key,
                     std::chrono::milliseconds timeout) {
  const StoreMessage reply =
      Ask(StoreAsk::kWait, {key}, timeout.count(), timeout);
  return reply.code != static_cast<uint8_t>(StoreReply::kNotThere);
}

void JobStore::wait(const std::vector<std::string>& keys,
                    const std::chrono::milliseconds& timeout) {
  ThrowUnlessThere(Ask(StoreAsk::kWait, keys, timeout.count(), timeout), keys,
                   timeout);
}

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
    // The caller is not asked while answers come at once.
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
