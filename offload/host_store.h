// A store in this machine's memory.
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
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/store_parts.h"

namespace fsdp::offload {

// All regions lie in one piece of memory, which is allocated when the store is
// made; new regions take the place of erased ones. The calling thread copies,
// so a transfer is over when Read() or Write() returns.
class HostStore : public ParamStore {
 public:
  // Makes a store for `capacity` bytes of regions, each counted by
  // StoredBytes(). `allocator` must outlive it.
  static absl::StatusOr<std::unique_ptr<HostStore>> Make(
      int64_t capacity, PageAllocator& allocator = PageAllocator::System());

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

  // Returns the region's own memory, for callers that copy by themselves (a
  // device's stream). It starts at a page and is valid until Erase(). NotFound.
  absl::StatusOr<absl::Span<char>> Memory(absl::string_view region);
  // The same for callers that write all of it before anybody reads; the memory
  // of a new region has any content.
  absl::StatusOr<absl::Span<char>> MemoryToFill(absl::string_view region);

 private:
  struct Region;

  HostStore(int64_t capacity, PageMemory memory);

  absl::StatusOr<std::shared_ptr<Region>> Find(absl::string_view what,
                                               absl::string_view region) const;
  // Runs `copy`, which moves `bytes`, as a transfer that `meter` counts.
  absl::Status Measure(TransferMeter HostStore::*meter, int64_t bytes,
                       absl::FunctionRef<absl::Status()> copy);

  const int64_t capacity_;
  const PageMemory memory_;
  mutable absl::Mutex mutex_;
  Extents extents_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::shared_ptr<Region>> regions_
      ABSL_GUARDED_BY(mutex_);
  TransferMeter reads_ ABSL_GUARDED_BY(mutex_);
  TransferMeter writes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_HOST_STORE_H_
