#include "replicas/membership/testing/memory_registers.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace fsdp::replicas::testing {

absl::StatusOr<std::optional<std::string>> MemoryRegisters::Get(
    const std::string& key) {
  const absl::MutexLock lock(&mutex_);
  const auto found = values_.find(key);
  if (found == values_.end()) return std::nullopt;
  return std::optional<std::string>(found->second);
}

absl::Status MemoryRegisters::Set(const std::string& key,
                                  const std::string& value) {
  const absl::MutexLock lock(&mutex_);
  values_[key] = value;
  return absl::OkStatus();
}

absl::StatusOr<std::string> MemoryRegisters::CompareAndSet(
    const std::string& key, const std::string& expected,
    const std::string& value) {
  const absl::MutexLock lock(&mutex_);
  const auto found = values_.find(key);
  std::string old = found == values_.end() ? "" : found->second;
  if (old != expected) return old;
  values_[key] = value;
  return value;
}

absl::StatusOr<int64_t> MemoryRegisters::Add(const std::string& key,
                                             int64_t addend) {
  const absl::MutexLock lock(&mutex_);
  const auto found = values_.find(key);
  int64_t sum = 0;
  if (found != values_.end() && !absl::SimpleAtoi(found->second, &sum)) {
    return absl::InvalidArgumentError(absl::StrCat(key, " has no number"));
  }
  sum += addend;
  values_[key] = absl::StrCat(sum);
  return sum;
}

absl::Status MemoryRegisters::Remove(const std::string& key) {
  const absl::MutexLock lock(&mutex_);
  values_.erase(key);
  return absl::OkStatus();
}

absl::StatusOr<bool> MemoryRegisters::HasAll(
    const std::vector<std::string>& keys) {
  const absl::MutexLock lock(&mutex_);
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) {
    mutex_.AssertReaderHeld();
    return values_.find(key) != values_.end();
  });
}

absl::Status MemoryRegisters::Await(const std::string& key,
                                    absl::Time deadline) {
  const auto is_there = [&] {
    mutex_.AssertReaderHeld();
    return values_.find(key) != values_.end();
  };
  const absl::MutexLock lock(&mutex_);
  if (mutex_.AwaitWithDeadline(absl::Condition(&is_there), deadline)) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError(absl::StrCat(key, " did not come"));
}

size_t MemoryRegisters::size() const {
  const absl::MutexLock lock(&mutex_);
  return values_.size();
}

void MemoryRegisters::Clear() {
  const absl::MutexLock lock(&mutex_);
  values_.clear();
}

}  // namespace fsdp::replicas::testing
