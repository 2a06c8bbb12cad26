#include "comm/meeting/store_table.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace fsdp::comm {

absl::Status StoreTable::Set(const std::string& key, std::string value) {
  const std::string* const old = Find(key);
  const size_t before = old == nullptr ? 0 : key.size() + old->size();
  const size_t after = key.size() + value.size();
  if (bytes_ - before + after > max_bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the job's store is full: it has ", bytes_, " of ",
                     max_bytes_, " bytes, and ", after, " are to be added"));
  }
  if (old == nullptr) new_keys_.push_back(key);
  bytes_ += after - before;
  values_[key] = std::move(value);
  return absl::OkStatus();
}

absl::StatusOr<std::string> StoreTable::CompareAndSet(
    const std::string& key, const std::string& expected, std::string value) {
  const std::string* const old = Find(key);
  const bool sets = old == nullptr ? expected.empty() : *old == expected;
  if (!sets) return old == nullptr ? expected : *old;
  FSDP_RETURN_IF_ERROR(Set(key, value));
  return value;
}

absl::StatusOr<int64_t> StoreTable::Add(const std::string& key,
                                        int64_t addend) {
  const std::string* const old = Find(key);
  int64_t sum = 0;
  if (old != nullptr && !absl::SimpleAtoi(*old, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the key \"", key, "\" has no number to add to"));
  }
  if (__builtin_add_overflow(sum, addend, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the number of the key \"", key, "\" would overflow"));
  }
  FSDP_RETURN_IF_ERROR(Set(key, absl::StrCat(sum)));
  return sum;
}

bool StoreTable::Delete(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  bytes_ -= key.size() + found->second.size();
  values_.erase(found);
  return true;
}

int64_t StoreTable::DeleteAll(absl::string_view prefix) {
  int64_t deleted = 0;
  for (auto entry = values_.begin(); entry != values_.end();) {
    const auto& [key, value] = *entry;
    if (!absl::StartsWith(key, prefix)) {
      ++entry;
      continue;
    }
    bytes_ -= key.size() + value.size();
    entry = values_.erase(entry);
    ++deleted;
  }
  return deleted;
}

const std::string* StoreTable::Find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

const std::string* StoreTable::FirstMissing(
    const std::vector<std::string>& keys) const {
  for (const std::string& key : keys) {
    if (Find(key) == nullptr) return &key;
  }
  return nullptr;
}

}  // namespace fsdp::comm
