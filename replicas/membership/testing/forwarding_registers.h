// Registers that hand all calls on; tests change those that they want to.
#ifndef REPLICAS_MEMBERSHIP_TESTING_FORWARDING_REGISTERS_H_
#define REPLICAS_MEMBERSHIP_TESTING_FORWARDING_REGISTERS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

class ForwardingRegisters : public Registers {
 public:
  // `base` outlives it.
  explicit ForwardingRegisters(Registers* base) : base_(base) {}

  absl::StatusOr<std::optional<std::string>> Get(
      const std::string& key) override {
    return base_->Get(key);
  }
  absl::Status Set(const std::string& key, const std::string& value) override {
    return base_->Set(key, value);
  }
  absl::StatusOr<std::string> CompareAndSet(const std::string& key,
                                            const std::string& expected,
                                            const std::string& value) override {
    return base_->CompareAndSet(key, expected, value);
  }
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t addend) override {
    return base_->Add(key, addend);
  }
  absl::Status Remove(const std::string& key) override {
    return base_->Remove(key);
  }
  absl::StatusOr<bool> HasAll(const std::vector<std::string>& keys) override {
    return base_->HasAll(keys);
  }
  absl::Status Await(const std::string& key, absl::Time deadline) override {
    return base_->Await(key, deadline);
  }

 protected:
  Registers* base() const { return base_; }

 private:
  Registers* const base_;
};

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_MEMBERSHIP_TESTING_FORWARDING_REGISTERS_H_
