#include "replicas/membership/testing/faulty_registers.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "replicas/membership/registers.h"

namespace fsdp::replicas::testing {

absl::Status FaultyRegisters::Meet(const std::function<void()>& call) {
  switch (hooks_.fate()) {
    case Fate::kDone:
      return absl::OkStatus();
    case Fate::kLost:
      break;
    case Fate::kNoReply:
      call();
      break;
    case Fate::kDelayed:
      hooks_.later(call);
      break;
  }
  return absl::UnavailableError("simulated");
}

absl::StatusOr<std::optional<std::string>> FaultyRegisters::Get(
    const std::string& key) {
  FSDP_RETURN_IF_ERROR(Meet([] {}));
  return base_->Get(key);
}

absl::Status FaultyRegisters::Set(const std::string& key,
                                  const std::string& value) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Set(key, value).IgnoreError(); }));
  return base_->Set(key, value);
}

absl::StatusOr<std::string> FaultyRegisters::CompareAndSet(
    const std::string& key, const std::string& expected,
    const std::string& value) {
  const auto exchange = [=, base = base_, exchanged = hooks_.exchanged] {
    absl::StatusOr<std::string> now = base->CompareAndSet(key, expected, value);
    exchanged();
    return now;
  };
  FSDP_RETURN_IF_ERROR(Meet([=] { exchange().IgnoreError(); }));
  return exchange();
}

absl::StatusOr<int64_t> FaultyRegisters::Add(const std::string& key,
                                             int64_t addend) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Add(key, addend).IgnoreError(); }));
  return base_->Add(key, addend);
}

absl::Status FaultyRegisters::Remove(const std::string& key) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Remove(key).IgnoreError(); }));
  return base_->Remove(key);
}

absl::StatusOr<bool> FaultyRegisters::HasAll(
    const std::vector<std::string>& keys) {
  FSDP_RETURN_IF_ERROR(Meet([] {}));
  return base_->HasAll(keys);
}

absl::Status FaultyRegisters::Await(const std::string& key, absl::Time) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> value, Get(key));
  return value.has_value() ? absl::OkStatus()
                           : absl::DeadlineExceededError("simulated");
}

}  // namespace fsdp::replicas::testing
