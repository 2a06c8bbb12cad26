// Writes many ranges of bytes of several files as fast as the disk takes them.
#ifndef CHECKPOINT_FILES_RANGE_WRITER_H_
#define CHECKPOINT_FILES_RANGE_WRITER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/files/checksums.h"
#include "base/files/file_system.h"
#include "base/start_thread.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {

struct RangeWriterOptions {
  // The writer takes buffers * buffer_bytes of memory.
  int64_t buffer_bytes = int64_t{4} << 20;  // a multiple of kBlockBytes
  int buffers = 4;                          // at least 2
  // If true, the bytes of each file go to it front to back, one write after the
  // other, through the page cache, for storage that takes no others. Ranges of
  // a file come so, and SetSize() must not be called then.
  bool in_order = false;
  // Once it is true, calls return Cancelled. The thread that writes reads it.
  // If null, nothing is cancelled.
  const std::atomic<bool>* cancelled = nullptr;
  // Called with the bytes that are on their way to the disk so far, by the
  // thread that writes. May be null.
  std::function<void(int64_t bytes)> progress = nullptr;
  // Called by any thread when a call that opens, writes or syncs a file has
  // returned, with the bytes that it has written. May be null.
  std::function<void(int64_t bytes)> came_back = nullptr;
};

// Ranks write their ranges of the same files at the same time. Whole pages go
// past the page cache if the file system can. Pages at the ends of a range, in
// which others may write other bytes, go through it. One thread uses a writer.
class RangeWriter {
 public:
  // Produces the bytes of a range from `position` on, part after part.
  using Fill =
      absl::FunctionRef<absl::Status(int64_t position, absl::Span<char> out)>;

  // Pieces name files by their index in `paths`. A file is opened, or created,
  // when the first of its bytes are written; its folder must exist. `files`
  // outlives the writer. ResourceExhausted: no memory for the buffers.
  static absl::StatusOr<std::unique_ptr<RangeWriter>> Create(
      FileSystem& files, std::vector<std::string> paths,
      RangeWriterOptions options);
  RangeWriter(const RangeWriter&) = delete;
  RangeWriter& operator=(const RangeWriter&) = delete;
  ~RangeWriter();  // waits; bytes whose write has not begun are dropped

  // Gives a file its final size. One rank does so; others may have written to
  // it before.
  absl::Status SetSize(int64_t file, int64_t bytes);

  // Writes a range; ranges of one writer must not overlap. It is fastest if one
  // continues the last. A range without bytes creates the file. Errors are that
  // of `fill`, Cancelled, and that of an earlier write that was under way;
  // after an error all calls return it.
  absl::Status Write(int64_t file, int64_t offset, int64_t bytes, Fill fill);

  // Writes bytes that exist already.
  absl::Status WriteBytes(int64_t file, int64_t offset,
                          absl::string_view bytes);

  // Call it once, at the end. When it returns, all is on the disk; it returns
  // the pieces with their checksums.
  absl::StatusOr<std::vector<FilePiece>> Finish();

 private:
  // Bytes [begin, end) of a file, in memory at begin % buffer_bytes.
  struct Buffer {
    char* memory = nullptr;
    File* file = nullptr;
    int64_t index = -1;  // of the file
    int64_t begin = 0;
    int64_t end = 0;
  };

  RangeWriter(FileSystem& files, std::vector<std::string> paths,
              RangeWriterOptions options, offload::PageMemory memory);

  absl::StatusOr<File*> Open(int64_t file);
  // Makes current_ a buffer with room for byte `offset` of the file.
  absl::Status Seek(int64_t file, int64_t offset);
  absl::Status WriteOnce(int64_t file, int64_t offset, int64_t bytes,
                         Fill fill);
  // Cancelled, or OK.
  absl::Status CheckCancelled() const;
  // Starts to write current_, if there is one.
  absl::Status Dispatch();
  void WriteOut(Buffer* buffer);
  void CameBack(int64_t bytes) const;
  absl::Status FinishOnce();

  bool HasFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !free_.empty();
  }
  bool AllFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return free_.size() == buffers_.size();
  }

  FileSystem& files_;
  const std::vector<std::string> paths_;
  const RangeWriterOptions options_;
  const offload::PageMemory memory_;
  std::vector<std::unique_ptr<File>> open_;  // by path; null: not yet
  std::vector<Buffer> buffers_;
  Buffer* current_ = nullptr;  // being filled
  std::vector<FilePiece> pieces_;
  int64_t dispatched_ = 0;  // bytes
  absl::Status failed_;     // the error that a call has returned

  absl::Mutex mutex_;
  std::vector<Buffer*> free_ ABSL_GUARDED_BY(mutex_);
  absl::Status write_status_ ABSL_GUARDED_BY(mutex_);  // the first error
  IoThreads threads_;  // the last member: ends first
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_RANGE_WRITER_H_
