// Registers for tests: those of one process, and some that hand calls on.
#ifndef REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_
#define REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
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

// Hands all calls on; tests change those that they want to.
class ForwardingRegisters : public Registers {
 public:
  // `base` outlives it.
  explicit ForwardingRegisters(Registers* base) : base_(base) {}

  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    return Forward([=, base = base_] { return base->Get(key); });
  }
  absl::Status Set(const std::string& key, const std::string& value) override {
    return Forward([=, base = base_] { return base->Set(key, value); });
  }
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override {
    return Forward([=, base = base_] {
      return base->CompareAndSet(key, expected, value);
    });
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override {
    return Forward([=, base = base_] { return base->Add(key, addend); });
  }
  absl::Status Remove(const std::string& key) override {
    return Forward([=, base = base_] { return base->Remove(key); });
  }
  absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) override {
    return Forward([=, base = base_] { return base->HasAll(keys); });
  }
  absl::Status Await(const std::string& key, absl::Time deadline) override {
    return Forward([=, base = base_] { return base->Await(key, deadline); });
  }

 protected:
  // Returns what a call ends with instead of being handed on, if not OK. It may
  // make the call for nobody, even later.
  virtual absl::Status Allow(const std::function<void()>& /*call*/) {
    return absl::OkStatus();
  }
  template <typename Call>
  auto Forward(Call call) -> decltype(call()) {
    FSDP_RETURN_IF_ERROR(Allow([call] { call().IgnoreError(); }));
    return call();
  }
  Registers* base() const { return base_; }

 private:
  Registers* const base_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_MEMORY_REGISTERS_H_
