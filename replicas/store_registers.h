// Registers in a job's store, which outlives the replicas.
#ifndef REPLICAS_STORE_REGISTERS_H_
#define REPLICAS_STORE_REGISTERS_H_

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/torch_status.h"
#include "comm/group/operation_watchdog.h"
#include "comm/meeting/job_store.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas {

class StoreRegisters final : public Registers {
 public:
  // Keys begin with `prefix`. Calls return Unavailable if the store does not
  // answer for some seconds. Errors are those of JobStore::Connect().
  static absl::StatusOr<std::unique_ptr<StoreRegisters>> Connect(
      const comm::JobStorePlace& place, const std::string& prefix,
      const comm::WaitLimits& limits);

  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override;
  absl::Status Set(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override;
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override;
  absl::Status Remove(const std::string& key) override;
  absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) override;
  absl::Status Await(const std::string& key, absl::Time deadline) override;

  // Removes all keys that begin with `prefix`, which is not empty.
  absl::Status RemoveAll(const std::string& prefix);

 private:
  StoreRegisters(c10::intrusive_ptr<comm::JobStore> store,
                 const std::string& prefix)
      : store_(std::move(store)), prefix_(prefix + "/") {}

  // FailedPrecondition: the store was started anew, and has lost all.
  absl::Status CheckIdentity();
  absl::Status Call(FallibleRef call);
  std::string KeyOf(const std::string& key) const { return prefix_ + key; }

  const c10::intrusive_ptr<comm::JobStore> store_;
  const std::string prefix_;
  std::string identity_;
  std::atomic<bool> broke_off_{false};  // the store may be another one since
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_STORE_REGISTERS_H_
