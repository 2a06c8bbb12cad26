// A store in a file, usually on an SSD: it bypasses the page cache and has many
// requests in flight.
#ifndef OFFLOAD_FILE_STORE_H_
#define OFFLOAD_FILE_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/output_file.h"
#include "offload/file_engine.h"
#include "offload/param_store.h"
#include "offload/store_parts.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

struct FileStoreOptions {
  std::string directory;
  // Bytes of all regions, each counted by StoredBytes(). The file is as large,
  // and reserved when the store is made. A store that can be rolled back takes
  // twice as much, and one that is kept a little more.
  int64_t capacity = 0;

  // Blocks are read, written and checked as one; a multiple of kPageBytes. A
  // smaller write first reads the rest of its block.
  int64_t block_bytes = int64_t{1} << 20;
  // Blocks in flight. The store has as many blocks of memory.
  int queue_depth = 8;
  // Unset: io_uring, or threads if the kernel refuses it.
  std::optional<QueueKind> queue;

  // Scratch, the default, ends with the process. A kept file has the name
  // `name` and can be reopened at its last commit, the last Flush() that ended
  // well.
  bool keep = false;
  std::string name = "offload";
  // Its owner ("run 7, rank 3 of 8, exp_avg"), at most 1024 bytes. Reopen()
  // refuses another owner's file.
  std::string owner;
  // A number that all files of one run share, written into a new file: see
  // FileStore::run(). Reopen() does not look at it.
  uint64_t run = 0;
  // Allows Rollback() of scratch. A kept file can always be rolled back.
  bool rollback = false;
  // The most regions that a kept file can have at a time.
  int64_t max_regions = 4096;
  // Limits the wait for a process that still holds a kept file.
  absl::Duration patience = absl::Seconds(10);

  // It has to outlive the store.
  SystemCalls* system = &SystemCalls::Real();
};

// An open file. A scratch file has no name (O_TMPFILE), so the system frees it
// when the process ends in any way. A kept file is locked by flock(2), which
// also ends with the process.
//
// A directory may have many users and names that are easy to guess. A kept file
// is used only if it is a regular file and not a link, has one name, belongs to
// this process's user, and can be written by nobody else.
class BackingFile {
 public:
  // Makes a file without a name. If the file system has none, it loses its name
  // right away.
  static absl::StatusOr<BackingFile> Scratch(SystemCalls& system,
                                             const std::string& directory);

  // Makes a file that gets its name `path` by Publish(), and is gone without
  // it. AlreadyExists; Unavailable: another process is making `path` for longer
  // than `patience`; PermissionDenied or FailedPrecondition: somebody has put
  // another thing there.
  static absl::StatusOr<BackingFile> New(SystemCalls& system,
                                         const std::string& path,
                                         absl::Duration patience);

  // Opens a kept file. NotFound; Unavailable: another process has it for longer
  // than `patience` (one that was killed may have writes under way);
  // PermissionDenied or FailedPrecondition: the file is not trusted.
  static absl::StatusOr<BackingFile> Existing(SystemCalls& system,
                                              const std::string& path,
                                              absl::Duration patience);

  BackingFile(BackingFile&& other) noexcept;
  BackingFile& operator=(BackingFile&&) = delete;
  ~BackingFile();

  // Reserves space. ResourceExhausted tells the bytes needed and available.
  absl::Status Reserve(int64_t bytes);

  // Bypasses the page cache if the file system can.
  void BypassCache();

  absl::Status Publish();

  absl::StatusOr<int64_t> Bytes() const;

  int descriptor() const { return descriptor_.get(); }
  const std::string& path() const { return path_; }
  // "O_DIRECT", or what is used instead and why.
  const std::string& notes() const { return notes_; }

 private:
  BackingFile(SystemCalls& system, std::string path, int descriptor)
      : system_(&system), path_(std::move(path)), descriptor_(descriptor) {}

  absl::Status LockTrusted(absl::Duration patience);
  absl::Status CheckTrusted() const;
  void Note(absl::string_view note);

  SystemCalls* system_;
  std::string path_;
  std::string unpublished_;  // a name to remove unless the file is published
  UniqueFd descriptor_;
  std::string notes_;
};

// A store in a file. If it can be rolled back, it never writes over its last
// commit: blocks have two places, and the first write after a commit goes to
// the other place. Each Flush() that ends well is a commit; scratch only
// remembers it, and a kept file records it on the disk.
//
// A process may be killed at any instant: a kept file then holds all of the
// last commit, or of the one that was being made. The commit before the last
// stays until the first write after the last, so that several ranks can agree
// on one that all have finished. The space of erased regions that a commit has
// is free once a Flush() started after Erase() has ended well.
class FileStore : public ParamStore {
 public:
  // Makes a file. InvalidArgument: impossible options; ResourceExhausted, with
  // the bytes needed and available; AlreadyExists: a kept file; NotFound,
  // PermissionDenied, Unavailable.
  static absl::StatusOr<std::unique_ptr<FileStore>> Make(
      const FileStoreOptions& options);

  // Opens a kept file at its last commit, or at `commit`, dropping later ones.
  // The file decides capacity, block size and max_regions. NotFound;
  // FailedPrecondition: another owner's file, or no such commit; DataLoss: it
  // was cut off or changed; Unavailable.
  static absl::StatusOr<std::unique_ptr<FileStore>> Reopen(
      const FileStoreOptions& options,
      std::optional<int64_t> commit = std::nullopt);

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

  // Counts the Flush() that have ended well over the life of a kept file.
  int64_t commit() const;
  // Returns FileStoreOptions::run of the time when the file was made.
  uint64_t run() const;

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

  FileStore(BackingFile file, FileEngineParts parts);

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
  // Space of regions that the last commit has and the next one will not have.
  std::vector<Space> erased_ ABSL_GUARDED_BY(mutex_);
  TransferMeter reads_ ABSL_GUARDED_BY(mutex_);
  TransferMeter writes_ ABSL_GUARDED_BY(mutex_);
  int64_t commit_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t flushes_ ABSL_GUARDED_BY(mutex_) = 0;  // under way

  std::unique_ptr<FileEngine> engine_;  // ends before what it reports to
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_STORE_H_
