// Shards in a file: on an SSD, past the page cache, with many requests in
// flight.
#ifndef OFFLOAD_FILE_STORE_H_
#define OFFLOAD_FILE_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "offload/backing_file.h"
#include "offload/extents.h"
#include "offload/file_layout.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/system_calls.h"
#include "offload/transfer_meter.h"

namespace fsdp::offload {

struct CommitRecord;
class FileEngine;
struct FileEngineParts;
class FileLayout;
struct StoredRegion;

struct FileStoreOptions {
  std::string directory;
  // For regions of so many bytes in all, each counted by StoredBytes(). The
  // file is as large, and all of it is reserved when the store is made; one
  // that can be rolled back is twice as large, and one that is kept is a little
  // larger still.
  int64_t capacity = 0;

  // What is read, written and checked as one; a multiple of kPageBytes. Less
  // than a block is written by reading the rest of it first.
  int64_t block_bytes = int64_t{1} << 20;
  // Blocks in flight. The store has as many blocks of memory.
  int queue_depth = 8;
  // CRC32C of each block, held against what is read. Without, a read tells
  // nothing but errors of the device.
  bool checksums = true;
  // kAutomatic: io_uring, or threads where the kernel refuses.
  enum class Queue { kAutomatic, kIoUring, kThreads };
  Queue queue = Queue::kAutomatic;
  bool direct = true;  // O_DIRECT where the file system has it

  // Scratch, the default, is gone with the process. A file that is kept has
  // the name `name` and can be reopened at its last commit: each Flush() that
  // has ended well is one.
  bool keep = false;
  std::string name = "offload";
  // Whose it is ("run 7, rank 3 of 8, exp_avg"): Reopen() refuses a file of
  // another owner. At most 1024 bytes.
  std::string owner;
  // A number that all files of one run share, written into one that is made:
  // see FileStore::run(). Reopen() does not look at it.
  uint64_t run = 0;
  // Rollback() of scratch. A kept file can always be rolled back.
  bool rollback = false;
  // How many regions a kept file can have at a time.
  int64_t max_regions = 4096;
  // How long to wait for a process that still holds a kept file.
  absl::Duration patience = absl::Seconds(10);

  // These have to outlive the store.
  PageAllocator* allocator = &PageAllocator::System();
  SystemCalls* system = &SystemCalls::Real();
};

// What can be rolled back is never written where its last commit lies: blocks
// have two places, and the first write after a commit goes to the other one.
// Each Flush() that has ended well is a commit; scratch only remembers it, a
// kept file writes it down.
//
// A process that is killed at any instant leaves a kept file that holds the
// last commit, or the one that was being made, whole. The commit before the
// last one lasts until the first write after the last, so that several ranks
// can agree on one that all of them have finished. Space of regions that are in
// a commit is free once a Flush() that was started after Erase() has ended
// well.
class FileStore : public ParamStore {
 public:
  // What a store will take of the disk, and of `allocator`, for valid options.
  static int64_t DiskBytes(const FileStoreOptions& options);
  static int64_t MemoryBytes(const FileStoreOptions& options);

  // A new file. InvalidArgument for options that cannot be; ResourceExhausted
  // with the bytes that are needed and those there are; AlreadyExists for one
  // to keep; NotFound, PermissionDenied, Unavailable.
  static absl::StatusOr<std::unique_ptr<FileStore>> Make(
      const FileStoreOptions& options);

  // A kept file, at its last commit or at `commit`; later ones are dropped.
  // Capacity, block size, checksums and max_regions are the file's. NotFound;
  // FailedPrecondition for a file of another owner or without such a commit;
  // DataLoss for one that was cut off or changed; Unavailable.
  static absl::StatusOr<std::unique_ptr<FileStore>> Reopen(
      const FileStoreOptions& options,
      std::optional<int64_t> commit = std::nullopt);

  ~FileStore() override;

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

  // How many Flush() have ended well over the life of a kept file.
  int64_t commit() const;
  // FileStoreOptions::run when the file was made.
  uint64_t run() const;
  // All regions, sorted.
  std::vector<std::string> Regions() const;

 private:
  struct Entry {
    std::shared_ptr<StoredRegion> region;
    int64_t transfers = 0;  // under way
    bool in_commit = false;
  };
  struct Space {
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  FileStore(BackingFile file, std::string description, FileEngineParts parts);

  absl::StatusOr<std::unique_ptr<Transfer>> Start(FileOperation::Kind kind,
                                                  absl::string_view region,
                                                  int64_t offset, char* data,
                                                  int64_t bytes);
  void TransferIsOver(const FileOperation& operation,
                      const absl::Status& result);
  void FlushIsOver(const std::vector<Space>& erased,
                   const absl::Status& result);
  absl::Status Restore(const CommitRecord& record);

  const BackingFile file_;
  const std::string description_;
  const FileLayout& layout_;

  mutable absl::Mutex mutex_;
  Extents extents_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  // Of regions that the last commit has and the next one will not.
  std::vector<Space> erased_ ABSL_GUARDED_BY(mutex_);
  TransferMeter reads_ ABSL_GUARDED_BY(mutex_);
  TransferMeter writes_ ABSL_GUARDED_BY(mutex_);
  int64_t commit_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t flushes_ ABSL_GUARDED_BY(mutex_) = 0;  // under way

  std::unique_ptr<FileEngine> engine_;  // ends before what it reports to
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_STORE_H_
