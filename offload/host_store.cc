#include "offload/host_store.h"

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"

namespace fsdp::offload {

struct HostStore::Region {
  Region(char* data, int64_t offset, int64_t bytes)
      : data(data), offset(offset), bytes(bytes) {}

  // Fills it only once: zeros cost as much as what is written over them.
  void MakeZeros() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (!std::exchange(filled, true) && bytes > 0) std::memset(data, 0, bytes);
  }

  char* const data;
  const int64_t offset;  // in the pool
  const int64_t bytes;
  // Held while bytes are copied or the region is erased.
  absl::Mutex mutex;
  bool erased ABSL_GUARDED_BY(mutex) = false;
  bool filled ABSL_GUARDED_BY(mutex) = false;  // else `data` means zeros
};

absl::StatusOr<std::unique_ptr<HostStore>> HostStore::Make(
    int64_t capacity, PageAllocator& allocator) {
  if (capacity < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("make a host store: ", capacity, " bytes is no capacity"));
  }
  capacity = StoredBytes(capacity);
  FSDP_ASSIGN_OR_RETURN(PageMemory memory,
                        PageMemory::Allocate(allocator, capacity));
  return absl::WrapUnique(new HostStore(capacity, std::move(memory)));
}

HostStore::HostStore(int64_t capacity, PageMemory memory)
    : capacity_(capacity), memory_(std::move(memory)), extents_(capacity) {}

absl::Status HostStore::Create(absl::string_view region, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(CheckNewRegion(region, bytes));
  absl::MutexLock lock(&mutex_);
  if (regions_.contains(region)) return RegionExists(region);
  FSDP_ASSIGN_OR_RETURN(const int64_t offset, extents_.TakeFor(region, bytes));
  regions_.emplace(
      region, std::make_shared<Region>(memory_.data() + offset, offset, bytes));
  return absl::OkStatus();
}

absl::Status HostStore::Erase(absl::string_view region) {
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return NoSuchRegion("erase", region);
  Region& erased = *found->second;
  {
    absl::MutexLock copies(&erased.mutex);
    erased.erased = true;
  }
  extents_.Give(erased.offset, StoredBytes(erased.bytes));
  regions_.erase(found);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<HostStore::Region>> HostStore::Find(
    absl::string_view what, absl::string_view region) const {
  absl::MutexLock lock(&mutex_);
  const auto found = regions_.find(region);
  if (found == regions_.end()) return NoSuchRegion(what, region);
  return found->second;
}

absl::StatusOr<int64_t> HostStore::Size(absl::string_view region) const {
  FSDP_ASSIGN_OR_RETURN(const auto found, Find("ask for the size of", region));
  return found->bytes;
}

absl::StatusOr<absl::Span<char>> HostStore::Memory(absl::string_view region) {
  FSDP_ASSIGN_OR_RETURN(const auto found, Find("use the memory of", region));
  absl::MutexLock lock(&found->mutex);
  found->MakeZeros();
  return absl::MakeSpan(found->data, found->bytes);
}

absl::StatusOr<absl::Span<char>> HostStore::MemoryToFill(
    absl::string_view region) {
  FSDP_ASSIGN_OR_RETURN(const auto found, Find("fill the memory of", region));
  absl::MutexLock lock(&found->mutex);
  found->filled = true;
  return absl::MakeSpan(found->data, found->bytes);
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Read(
    absl::string_view region, int64_t offset, absl::Span<char> out) {
  FSDP_ASSIGN_OR_RETURN(const auto from, Find("read", region));
  const auto bytes = static_cast<int64_t>(out.size());
  FSDP_RETURN_IF_ERROR(CheckRange("read", region, from->bytes, offset, bytes));
  FSDP_RETURN_IF_ERROR(Measure(&HostStore::reads_, bytes, [&] {
    absl::ReaderMutexLock lock(&from->mutex);
    if (from->erased) return NoSuchRegion("read", region);
    if (bytes == 0) return absl::OkStatus();
    if (from->filled) {
      std::memcpy(out.data(), from->data + offset, bytes);
    } else {
      std::memset(out.data(), 0, bytes);
    }
    return absl::OkStatus();
  }));
  return absl::make_unique<FinishedTransfer>();
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Write(
    absl::string_view region, int64_t offset, absl::Span<const char> in) {
  FSDP_ASSIGN_OR_RETURN(const auto to, Find("write", region));
  const auto bytes = static_cast<int64_t>(in.size());
  FSDP_RETURN_IF_ERROR(CheckRange("write", region, to->bytes, offset, bytes));
  FSDP_RETURN_IF_ERROR(Measure(&HostStore::writes_, bytes, [&] {
    absl::MutexLock lock(&to->mutex);
    if (to->erased) return NoSuchRegion("write", region);
    if (bytes == 0) return absl::OkStatus();
    if (bytes == to->bytes) to->filled = true;
    to->MakeZeros();
    std::memcpy(to->data + offset, in.data(), bytes);
    return absl::OkStatus();
  }));
  return absl::make_unique<FinishedTransfer>();
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Flush() {
  return absl::make_unique<FinishedTransfer>();
}

absl::Status HostStore::Rollback() { return CannotRollBack(Describe()); }

absl::Status HostStore::Measure(TransferMeter HostStore::*meter, int64_t bytes,
                                absl::FunctionRef<absl::Status()> copy) {
  {
    absl::MutexLock lock(&mutex_);
    (this->*meter).Start(absl::Now());
  }
  absl::Status result = copy();
  absl::MutexLock lock(&mutex_);
  (this->*meter).Finish(absl::Now(), result.ok(), bytes);
  return result;
}

StoreStats HostStore::Stats() const {
  absl::MutexLock lock(&mutex_);
  return StatsOf(reads_, writes_, extents_);
}

std::string HostStore::Describe() const {
  return absl::StrCat("host memory, ", capacity_, " bytes");
}

}  // namespace fsdp::offload
