// Keeps in memory what is needed of stores: read ahead of use, written behind
// it.
#ifndef OFFLOAD_OFFLOADER_H_
#define OFFLOAD_OFFLOADER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "offload/extents.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp::offload {

struct OffloaderOptions {
  // Of entries in memory, each counted by StoredBytes(). Allocated once.
  int64_t memory_bytes = 0;
  // Of each wait for the store.
  absl::Duration timeout = absl::Minutes(5);
  // Has to outlive the offloader.
  PageAllocator* allocator = &PageAllocator::System();
};

struct OffloaderStats {
  int64_t found = 0;       // in memory, when they were acquired
  int64_t prefetched = 0;  // on their way, or there for that
  int64_t missed = 0;
  double waited_seconds = 0;  // for reads and writes
  int64_t peak_memory_bytes = 0;
};

// An entry is a region of one of the stores, in memory from Acquire() to
// Release() and for as long afterwards as nothing else needs the room: the
// least recently used go first. What was changed is written as soon as it is
// released.
//
// When a write fails, its bytes stay in memory and are not lost: the failure is
// returned once, by whatever call waits for that write, and Flush() tries
// again. Used by one thread at a time.
class Offloader {
 public:
  // ResourceExhausted without memory.
  static absl::StatusOr<std::unique_ptr<Offloader>> Make(
      const OffloaderOptions& options);
  // Waits for what is under way.
  ~Offloader();

  // By number. Entries of all stores share the memory.
  int AddStore(std::unique_ptr<ParamStore> store);

  // A new entry of `bytes` zeros, by number. Errors as ParamStore::Create().
  absl::StatusOr<int> Add(int store, const std::string& name, int64_t bytes);
  // An entry for a region that the store has, because it was reopened for
  // example. NotFound; FailedPrecondition where its size is another one;
  // AlreadyExists where it has an entry.
  absl::StatusOr<int> Attach(int store, const std::string& name, int64_t bytes);
  // Erases the region of an entry that is not in use. Its number is free for a
  // new one, also after an error.
  absl::Status Remove(int entry);

  // Starts to read the entry if it is not in memory and there is room that
  // nothing needs. A hint: Acquire() reports what fails.
  void Prefetch(int entry);

  enum class Use {
    kRead,
    kUpdate,     // reads and changes
    kOverwrite,  // the bytes are of any value at first, and all are written
  };
  // The bytes of the entry, starting at a page, until Release(). Errors of the
  // store; ResourceExhausted when entries in use leave no room. An entry is in
  // use once at a time.
  absl::StatusOr<absl::Span<char>> Acquire(int entry, Use use);
  // An entry in use for kRead is changed after all. To be called before that:
  // it waits for a write of the entry that is still under way.
  void MarkChanged(int entry);
  void Release(int entry);

  // Waits until all that was released of a store is written, and for its
  // Flush(). FailedPrecondition when what could not be written is in use to be
  // changed.
  absl::Status Flush(int store);
  // Every entry of the store becomes what it was at the last Flush() of the
  // store that ended well, as ParamStore::Rollback() does. FailedPrecondition
  // when one is in use. After an error, nothing has changed.
  absl::Status Rollback(int store);

  const ParamStore& store(int store) const { return *stores_[store]; }
  int num_stores() const { return static_cast<int>(stores_.size()); }
  OffloaderStats stats() const;

 private:
  struct Entry {
    int store = -1;  // none: the number is free
    std::string name;
    int64_t bytes = 0;
    std::optional<int64_t> place;  // in memory_
    // Under way; read ahead, or written behind.
    std::unique_ptr<Transfer> transfer;
    bool writes = false;
    bool unwritten = false;  // the store has other bytes than the memory
    std::optional<Use> use;
    int64_t last_use = 0;
  };
  // Of an entry that was removed: it still has its memory.
  struct Orphan {
    std::unique_ptr<Transfer> transfer;
    int64_t place = 0;
    int64_t bytes = 0;
  };

  Offloader(const OffloaderOptions& options, PageMemory memory);

  Entry& At(int entry);
  int NewEntry(int store, const std::string& name, int64_t bytes);
  ParamStore& StoreOf(const Entry& entry) { return *stores_[entry.store]; }
  absl::Span<char> BytesOf(const Entry& entry) const;
  absl::Status StartRead(Entry& entry);
  absl::Status StartWrite(Entry& entry);
  absl::Status Settle(Entry& entry);
  absl::Status BringIn(Entry& entry);
  absl::Status WriteAgain(Entry& entry);
  // Room for `entry` in memory: of what is clean, and with `may_wait` of
  // whatever is not in use.
  absl::Status MakeRoom(Entry& entry, bool may_wait);
  // Takes notice, without waiting, of writes that have ended well, and of
  // orphans that are over: true if one has left its memory.
  bool Poll();
  Entry* NextToGo();
  void Drop(Entry& entry);
  absl::Status NoRoomFor(const Entry& entry) const;

  const OffloaderOptions options_;
  std::vector<std::unique_ptr<ParamStore>> stores_;
  const PageMemory memory_;
  Extents extents_;  // of memory_
  // Their transfers wait for their end, before the memory goes.
  std::vector<Entry> entries_;
  std::vector<Orphan> orphans_;
  int64_t uses_ = 0;
  OffloaderStats stats_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_OFFLOADER_H_
