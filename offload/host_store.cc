#include "offload/host_store.h"

#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"
#include "base/status_macros.h"

namespace fsdp::offload {

struct HostStore::Region {
  Region(char* data, int64_t offset, int64_t bytes)
      : data(data), offset(offset), bytes(bytes) {}

  char* const data;
  const int64_t offset;  // in the pool
  const int64_t bytes;
  // Held while bytes are copied, and to erase.
  absl::Mutex mutex;
  bool erased ABSL_GUARDED_BY(mutex) = false;
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
    : memory_(std::move(memory)), extents_(capacity) {}

absl::Status HostStore::Create(absl::string_view region, int64_t bytes) {
  FSDP_RETURN_IF_ERROR(CheckNewRegion(region, bytes));
  absl::MutexLock lock(&mutex_);
  if (regions_.contains(region)) return RegionExists(region);
  const absl::optional<int64_t> offset = extents_.Take(StoredBytes(bytes));
  if (!offset.has_value()) {
    return NoSpaceFor(region, bytes, extents_.capacity() - extents_.used(),
                      extents_.LargestFree());
  }
  char* const data = memory_.data() + *offset;
  if (bytes > 0) std::memset(data, 0, bytes);
  regions_.emplace(region, std::make_shared<Region>(data, *offset, bytes));
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
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Region> found,
                        Find("ask for the size of", region));
  return found->bytes;
}

absl::StatusOr<absl::Span<char>> HostStore::Memory(absl::string_view region) {
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Region> found,
                        Find("use the memory of", region));
  return absl::MakeSpan(found->data, found->bytes);
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Read(
    absl::string_view region, int64_t offset, absl::Span<char> out) {
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Region> from,
                        Find("read", region));
  const int64_t bytes = out.size();
  FSDP_RETURN_IF_ERROR(CheckRange("read", region, from->bytes, offset, bytes));
  FSDP_RETURN_IF_ERROR(Measure(&HostStore::reads_, bytes, [&] {
    absl::ReaderMutexLock lock(&from->mutex);
    if (from->erased) return NoSuchRegion("read", region);
    if (bytes > 0) std::memcpy(out.data(), from->data + offset, bytes);
    return absl::OkStatus();
  }));
  return absl::make_unique<FinishedTransfer>();
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Write(
    absl::string_view region, int64_t offset, absl::Span<const char> in) {
  FSDP_ASSIGN_OR_RETURN(const std::shared_ptr<Region> to,
                        Find("write", region));
  const int64_t bytes = in.size();
  FSDP_RETURN_IF_ERROR(CheckRange("write", region, to->bytes, offset, bytes));
  FSDP_RETURN_IF_ERROR(Measure(&HostStore::writes_, bytes, [&] {
    absl::MutexLock lock(&to->mutex);
    if (to->erased) return NoSuchRegion("write", region);
    if (bytes > 0) std::memcpy(to->data + offset, in.data(), bytes);
    return absl::OkStatus();
  }));
  return absl::make_unique<FinishedTransfer>();
}

absl::StatusOr<std::unique_ptr<Transfer>> HostStore::Flush() {
  return absl::make_unique<FinishedTransfer>();
}

absl::Status HostStore::Rollback() {
  return CannotRollBack(Describe(), "take a file store that does");
}

absl::Status HostStore::Measure(TransferMeter HostStore::*meter, int64_t bytes,
                                absl::FunctionRef<absl::Status()> copy) {
  {
    absl::MutexLock lock(&mutex_);
    (this->*meter).Start(absl::Now());
  }
  const absl::Status result = copy();
  absl::MutexLock lock(&mutex_);
  (this->*meter).Finish(absl::Now(), result.ok(), bytes);
  return result;
}

StoreStats HostStore::Stats() const {
  absl::MutexLock lock(&mutex_);
  StoreStats stats;
  stats.reads = reads_.stats();
  stats.writes = writes_.stats();
  stats.capacity_bytes = extents_.capacity();
  stats.used_bytes = extents_.used();
  stats.peak_used_bytes = extents_.peak_used();
  return stats;
}

std::string HostStore::Describe() const {
  return absl::StrCat("host memory, ", memory_.bytes(), " bytes");
}

}  // namespace fsdp::offload
