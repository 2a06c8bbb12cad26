// A client of a job's store, as a c10d::Store.
#ifndef COMM_MEETING_JOB_STORE_H_
#define COMM_MEETING_JOB_STORE_H_

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
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

// A client of a StoreServer. Thread-safe: calls at the same time use different
// connections, so that one that waits does not delay the others. A call ends
// within its timeout, by default getTimeout(), even if the process that serves
// is stopped; a call that waits for keys may take a few seconds longer. Errors
// are exceptions, as in every c10d::Store.
class JobStore final : public c10d::Store {
 public:
  // Connects once, which shows that the place and the secret are right. Returns
  // the errors of StoreConnection::Open().
  static absl::StatusOr<c10::intrusive_ptr<JobStore>> Connect(
      const JobStorePlace& place, absl::Duration timeout,
      const WaitLimits& limits);

  using c10d::Store::compareSet;
  using c10d::Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key,
                                  const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;
  // Waits for the key.
  std::vector<uint8_t> get(const std::string& key) override;
  // Returns the value of a key, or nullopt at once.
  std::optional<std::string> Find(const std::string& key);
  // Waits for a key. Returns false if it has not come within `timeout`.
  bool Await(const std::string& key, std::chrono::milliseconds timeout);
  int64_t add(const std::string& key, int64_t value) override {
    return Ask(StoreAsk::kAdd, {key}, value).number;
  }
  bool deleteKey(const std::string& key) override {
    return Ask(StoreAsk::kDelete, {key}).number != 0;
  }
  // Deletes all keys that begin with `prefix`, which is not empty, and returns
  // how many there were. It cleans up after a group that a store outlives.
  int64_t DeleteAll(const std::string& prefix) {
    return Ask(StoreAsk::kDeleteAll, {prefix}).number;
  }
  bool check(const std::vector<std::string>& keys) override {
    return Ask(StoreAsk::kCheck, keys).number != 0;
  }
  int64_t getNumKeys() override { return Ask(StoreAsk::kCount, {}).number; }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, getTimeout());
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  // Holds the connections that no call uses. Clones share it.
  class Pool;

  JobStore(std::shared_ptr<Pool> pool, std::chrono::milliseconds timeout)
      : Store(timeout), pool_(std::move(pool)) {}

  // Returns the store's reply, kNotThere if keys have not come within `wait`.
  // Throws errors.
  StoreMessage Ask(
      StoreAsk ask, std::vector<std::string> texts, int64_t number = 0,
      std::chrono::milliseconds wait = std::chrono::milliseconds(0)) const;

  const std::shared_ptr<Pool> pool_;
};

// One connection to a job's store. Used by one thread at a time.
class StoreConnection {
 public:
  // Connects as soon as somebody listens, and lets both ends show that they
  // know `secret`. Errors:
  //   PermissionDenied  one end does not know it; the text says which
  //   DeadlineExceeded  nobody listens, or whoever listens does not answer
  //   Unavailable       what listens is not the store of a job
  //   Cancelled         limits.stop_requested has asked to stop
  static absl::StatusOr<std::unique_ptr<StoreConnection>> Open(
      const std::string& address, int port, absl::string_view secret,
      const WaitLimits& limits);

  // Returns the reply to `ask`, kDone or kNotThere. FailedPrecondition says why
  // the store has refused it. After another error, such as DeadlineExceeded (no
  // answer) or Unavailable (it broke off), the connection is of no more use.
  absl::StatusOr<StoreMessage> Call(const StoreMessage& ask,
                                    absl::Time deadline);

 private:
  StoreConnection(UniqueFd fd, std::string place)
      : fd_(std::move(fd)), place_(std::move(place)) {}

  absl::Status ShakeHands(absl::string_view secret, const WaitLimits& limits);
  absl::Status Send(absl::string_view bytes, const WaitLimits& limits);
  // Returns exactly `count` bytes, or Unavailable if fewer came before the end.
  absl::StatusOr<std::string> Receive(size_t count, const WaitLimits& limits);
  absl::StatusOr<size_t> ReceiveSome(char* bytes, size_t count,
                                     const WaitLimits& limits);
  // NOLINTNEXTLINE(google-runtime-int): as pollfd has it
  absl::Status Await(short events, const WaitLimits& limits) const;

  const UniqueFd fd_;
  const std::string place_;  // "host:29500"
  FrameReader frames_;
};

}  // namespace fsdp::comm

#endif  // COMM_MEETING_JOB_STORE_H_
