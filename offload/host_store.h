// Shards in this machine's memory.
#ifndef OFFLOAD_HOST_STORE_H_
#define OFFLOAD_HOST_STORE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "offload/extents.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/transfer_meter.h"

namespace fsdp::offload {

// All regions lie in one piece of memory that is allocated when the store is
// made and used again for new regions when old ones are erased. Transfers are
// copies by the calling thread: over when Read() or Write() returns.
class HostStore : public ParamStore {
 public:
  // For regions of `capacity` bytes in all, each counted by StoredBytes().
  // `allocator` has to outlive the store. One that can be rolled back takes
  // twice the memory: the first write of a region after a Flush() copies it.
  static absl::StatusOr<std::unique_ptr<HostStore>> Make(
      int64_t capacity, PageAllocator& allocator = PageAllocator::System(),
      bool rollback = false);

  absl::Status Create(absl::string_view region, int64_t bytes) override;
  absl::Status Erase(absl::string_view region) override;
  absl::StatusOr<int64_t> Size(absl::string_view region) const override;
  absl::StatusOr<std::unique_ptr<Transfer>> Read(absl::string_view region,
                                                 int64_t offset,
                                                 absl::Span<char> out) override;
  absl::StatusOr<std::unique_ptr<Transfer>> Write(
      absl::string_view region, int64_t offset,
      absl::Span<const char> in) override;
  absl::StatusOr<std::unique_ptr<Transfer>> Flush() override;
  absl::Status Rollback() override;
  StoreStats Stats() const override;
  std::string Describe() const override;

  // The region itself, for those who copy on their own (a device's stream):
  // starts at a page, valid until Erase(). What they write is not undone by
  // Rollback(). NotFound.
  absl::StatusOr<absl::Span<char>> Memory(absl::string_view region);
  // The same for those who write all of it before anybody reads: of any content
  // when the region is new.
  absl::StatusOr<absl::Span<char>> MemoryToFill(absl::string_view region);

 private:
  struct Region;

  HostStore(int64_t capacity, PageMemory memory, bool rollback);

  absl::StatusOr<std::shared_ptr<Region>> Find(absl::string_view what,
                                               absl::string_view region) const;
  // Runs `copy`, which moves `bytes`, as a transfer that `meter` counts.
  absl::Status Measure(TransferMeter HostStore::*meter, int64_t bytes,
                       absl::FunctionRef<absl::Status()> copy);

  const int64_t capacity_;
  const PageMemory memory_;
  const bool rollback_;
  mutable absl::Mutex mutex_;
  Extents extents_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::shared_ptr<Region>> regions_
      ABSL_GUARDED_BY(mutex_);
  TransferMeter reads_ ABSL_GUARDED_BY(mutex_);
  TransferMeter writes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_HOST_STORE_H_
