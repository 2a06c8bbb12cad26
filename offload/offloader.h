// Keeps in memory what is needed of stores: reads it ahead of use and writes it
// behind.
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
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/store_parts.h"

namespace fsdp::offload {

struct OffloaderOptions {
  // Memory for entries, each counted by StoredBytes(). It is allocated once.
  int64_t memory_bytes = 0;
  // Limits each wait for a store.
  absl::Duration timeout = absl::Minutes(5);
  // It must outlive the offloader.
  PageAllocator* allocator = &PageAllocator::System();
};

// An entry is a region of a store. It is in memory from Acquire() to Release(),
// and afterwards until something else needs the room; the least recently used
// entry goes first. A changed entry is written as soon as it is released.
//
// When a write fails, its bytes stay in memory and are not lost: the call that
// waits for that write returns the error, once, and Flush() tries again. Used
// by one thread at a time.
class Offloader {
 public:
  // ResourceExhausted: there is too little memory.
  static absl::StatusOr<std::unique_ptr<Offloader>> Make(
      const OffloaderOptions& options);
  // Waits for transfers that are under way.
  ~Offloader();

  // Returns the store's number. Entries of all stores share the memory.
  int AddStore(std::unique_ptr<ParamStore> store);

  // Makes an entry of `bytes` zeros and returns its number. Errors are those of
  // ParamStore::Create().
  absl::StatusOr<int> Add(int store, const std::string& name, int64_t bytes);
  // Makes an entry for a region that the store has, perhaps because it was
  // reopened. NotFound; FailedPrecondition: another size; AlreadyExists: it has
  // an entry.
  absl::StatusOr<int> Attach(int store, const std::string& name, int64_t bytes);
  // Erases the region of an entry that is not in use, and frees its number,
  // even after an error.
  absl::Status Remove(int entry);

  // Starts to read the entry if it is not in memory and there is room that
  // nothing needs. A hint: Acquire() reports errors.
  void Prefetch(int entry);

  enum class Use {
    kRead,
    kUpdate,     // reads and changes
    kOverwrite,  // the bytes have any value at first, and all are written
  };
  // Returns the entry's bytes, which start at a page, until Release(). An entry
  // is in use once at a time. Errors of the store; ResourceExhausted: entries
  // in use leave no room.
  absl::StatusOr<absl::Span<char>> Acquire(int entry, Use use);
  // Announces that an entry in use for kRead will be changed; waits for a write
  // of it that is under way.
  void MarkChanged(int entry);
  void Release(int entry);

  // Waits until everything released of a store is written, and for its Flush().
  // FailedPrecondition: what could not be written is in use to be changed.
  absl::Status Flush(int store);
  // Sets every entry of the store back to the store's last Flush() that ended
  // well, as ParamStore::Rollback() does. FailedPrecondition: an entry is in
  // use. After an error nothing has changed.
  absl::Status Rollback(int store);

  const ParamStore& store(int store) const { return *stores_[store]; }
  int num_stores() const { return static_cast<int>(stores_.size()); }
  OffloaderStats stats() const { return stats_; }

 private:
  struct Entry {
    int store = -1;  // negative: the number is free
    std::string name;
    int64_t bytes = 0;
    std::optional<int64_t> place;  // in memory_
    // The transfer under way: a write behind if `writes`, else a read.
    std::unique_ptr<Transfer> transfer;
    bool writes = false;
    bool unwritten = false;  // the store has older bytes than the memory
    std::optional<Use> use;
    int64_t last_use = 0;
  };
  // The transfer of an entry that was removed, which still uses its memory.
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
  // Makes room for `entry` in memory by dropping unchanged entries, and with
  // `may_wait` any that are not in use.
  absl::Status MakeRoom(Entry& entry, bool may_wait);
  // Notices writes that have ended well and orphans that are over, without
  // waiting. Returns true if an orphan has left its memory.
  bool Poll();
  Entry* NextToGo();
  void Drop(Entry& entry);
  absl::Status NoRoomFor(const Entry& entry) const;

  const OffloaderOptions options_;
  std::vector<std::unique_ptr<ParamStore>> stores_;
  const PageMemory memory_;
  Extents extents_;  // of memory_
  // Their destructors wait for transfers, before the memory goes.
  std::vector<Entry> entries_;
  std::vector<Orphan> orphans_;
  int64_t uses_ = 0;
  OffloaderStats stats_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_OFFLOADER_H_
