#include "replicas/store_registers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace fsdp::replicas {
namespace {

constexpr char kWhat[] = "the keeper of the replicas' log";
constexpr char kIdentityKey[] = "identity";

// Time for an answer that need not wait; connecting again takes part of it.
constexpr absl::Duration kAnswerTime = absl::Seconds(3);
// The longest single wait in the store.
constexpr absl::Duration kWaitSlice = absl::Seconds(2);
// Before a store that could not be reached is tried again.
constexpr absl::Duration kPause = absl::Milliseconds(50);

absl::Status Silent(const absl::Status& status) {
  return absl::UnavailableError(
      absl::StrCat(kWhat, " does not answer: ", status.message()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreRegisters>> StoreRegisters::Connect(
    const comm::JobStorePlace& place, const std::string& prefix,
    const comm::WaitLimits& limits) {
  FSDP_ASSIGN_OR_RETURN(c10::intrusive_ptr<comm::JobStore> store,
                        comm::JobStore::Connect(place, kAnswerTime, limits));
  std::unique_ptr<StoreRegisters> registers(
      new StoreRegisters(std::move(store), prefix));
  // Notes which life of the store this is.
  absl::BitGen random;
  FSDP_ASSIGN_OR_RETURN(
      registers->identity_,
      registers->CompareAndSet(
          kIdentityKey, "",
          absl::StrCat(absl::Hex(random()), absl::Hex(random()))));
  return registers;
}

absl::Status StoreRegisters::CheckIdentity() {
  std::optional<std::string> found;
  const absl::Status status =
      TorchToStatus(kWhat, [&] { found = store_->Find(KeyOf(kIdentityKey)); });
  if (!status.ok()) return Silent(status);
  if (found == identity_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(kWhat,
                   " was started anew and knows nothing of this run: "
                   "start all replicas again, from a checkpoint"));
}

absl::Status StoreRegisters::Call(FallibleRef call) {
  if (broke_off_) {
    FSDP_RETURN_IF_ERROR(CheckIdentity());
    broke_off_ = false;
  }
  const absl::Status status = TorchToStatus(kWhat, call);
  if (status.ok()) return absl::OkStatus();
  if (absl::IsFailedPrecondition(status)) {  // the store refused
    return absl::InvalidArgumentError(status.message());
  }
  broke_off_ = true;
  return Silent(status);
}

absl::StatusOr<std::optional<std::string>> StoreRegisters::Get(
    const std::string& key) {
  std::optional<std::string> value;
  FSDP_RETURN_IF_ERROR(Call([&] { value = store_->Find(KeyOf(key)); }));
  return value;
}

absl::Status StoreRegisters::Set(const std::string& key,
                                 const std::string& value) {
  return Call([&] { store_->set(KeyOf(key), value); });
}

absl::StatusOr<std::string> StoreRegisters::CompareAndSet(
    const std::string& key, const std::string& expected,
    const std::string& value) {
  std::string found;
  FSDP_RETURN_IF_ERROR(
      Call([&] { found = store_->compareSet(KeyOf(key), expected, value); }));
  return found;
}

absl::StatusOr<int64_t> StoreRegisters::Add(const std::string& key,
                                            int64_t addend) {
  int64_t sum = 0;
  FSDP_RETURN_IF_ERROR(Call([&] { sum = store_->add(KeyOf(key), addend); }));
  return sum;
}

absl::Status StoreRegisters::Remove(const std::string& key) {
  return Call([&] { store_->deleteKey(KeyOf(key)); });
}

absl::Status StoreRegisters::RemoveAll(const std::string& prefix) {
  return Call([&] { store_->DeleteAll(KeyOf(prefix)); });
}

absl::StatusOr<bool> StoreRegisters::HasAll(
    const std::vector<std::string>& keys) {
  std::vector<std::string> all;
  all.reserve(keys.size());
  for (const std::string& key : keys) all.push_back(KeyOf(key));
  bool has_all = false;
  FSDP_RETURN_IF_ERROR(Call([&] { has_all = store_->check(all); }));
  return has_all;
}

absl::Status StoreRegisters::Await(const std::string& key,
                                   absl::Time deadline) {
  for (;;) {
    const absl::Duration left = deadline - absl::Now() + absl::Milliseconds(1);
    const auto slice =
        std::max(std::chrono::milliseconds(0),
                 absl::ToChronoMilliseconds(std::min(left, kWaitSlice)));
    bool is_there = false;
    absl::Status status =
        Call([&] { is_there = store_->Await(KeyOf(key), slice); });
    if (status.ok() && is_there) return absl::OkStatus();
    if (absl::Now() >= deadline) {
      if (!status.ok()) return status;
      return absl::DeadlineExceededError(
          absl::StrCat(kWhat, " has no ", key, " yet"));
    }
    if (absl::IsUnavailable(status)) {
      absl::SleepFor(std::min(kPause, deadline - absl::Now()));
    } else if (!status.ok()) {
      return status;
    }
  }
}

}  // namespace fsdp::replicas
