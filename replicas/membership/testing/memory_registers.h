// Registers of one process, for tests.
#ifndef REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_
#define REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

// They are never Unavailable. Deadlines are times of absl::Now().
class MemoryRegisters final : public Registers {
 public:
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

  size_t size() const;
  void Clear();

 private:
  mutable absl::Mutex mutex_;
  std::unordered_map<std::string, std::string> values_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_
