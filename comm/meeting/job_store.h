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
#include "absl/time/time.h"
#include "comm/group/wait_limits.h"
#include "comm/meeting/store_message.h"

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

}  // namespace fsdp::comm

#endif  // COMM_MEETING_JOB_STORE_H_
