// The store of a job, as c10d's groups want one.
#ifndef COMM_MEETING_JOB_STORE_H_
#define COMM_MEETING_JOB_STORE_H_

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/store_message.h"
#include "comm/startup/bootstrap_socket.h"

namespace fsdp::comm {

struct JobStorePlace {
  std::string address;
  int port = 0;
  std::string secret;  // all ranks have the same; empty: anybody gets in
};

// A client of a StoreServer. Thread-safe: calls at the same time have
// connections of their own, so that one that waits is in nobody's way. Every
// call ends within its timeout, plus seconds where it waits in the store, even
// if the process that serves is stopped: getTimeout() is that of all that have
// none of their own. Errors
// are exceptions, as of every c10d::Store.
class JobStore final : public c10d::Store {
 public:
  // Connected once, so that the place and the secret are known to be right.
  // Errors as of StoreConnection::Open().
  static absl::StatusOr<c10::intrusive_ptr<JobStore>> Connect(
      const JobStorePlace& place, absl::Duration timeout,
      const WaitLimits& limits);
  ~JobStore() override;

  using c10d::Store::compareSet;
  using c10d::Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  // Waits for the key.
  std::vector<uint8_t> get(const std::string& key) override;
  // As get() and wait(), for who can go on without the key.
  std::optional<std::string> Find(const std::string& key);
  bool Await(const std::string& key, std::chrono::milliseconds timeout);
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  // All keys that begin with `prefix`, which is not empty: what a group has
  // left in a store that outlives it. How many there were.
  int64_t DeleteAll(const std::string& prefix);
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  // Connections that no call has at the moment; clones have the same.
  class Pool;

  JobStore(std::shared_ptr<Pool> pool, std::chrono::milliseconds timeout);

  // What the store does, or throws; kNotThere after `wait`.
  StoreMessage Ask(
      StoreAsk ask, std::vector<std::string> texts, int64_t number = 0,
      std::chrono::milliseconds wait = std::chrono::milliseconds(0)) const;

  const std::shared_ptr<Pool> pool_;
};

// A rank's connection to its job's store.

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

#endif  // COMM_MEETING_JOB_STORE_H_
