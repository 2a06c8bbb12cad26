// Reads ranges of bytes of several files, and verifies their checksums.
#ifndef CHECKPOINT_FILES_RANGE_READER_H_
#define CHECKPOINT_FILES_RANGE_READER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "base/files/checksums.h"
#include "base/files/file_system.h"
#include "base/start_thread.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {

struct SourceFile {
  std::string path;
  // The size and checksums of the file; outlives the reader. Null if they are
  // not known, as for files that others have written: nothing is verified then.
  const FileSums* sums = nullptr;
};

struct RangeReaderOptions {
  // The reader takes chunks * chunk_bytes of memory.
  int64_t chunk_bytes = int64_t{4} << 20;  // a multiple of kBlockBytes
  int chunks = 4;                          // at least 2
  Caching caching = Caching::kDirect;
  // Ends the text about a damaged file.
  std::string advice = "load an older checkpoint";
  // Gives the reader's memory, such as pages that a device can copy from. If it
  // is null or has none, the system's pages are taken.
  std::shared_ptr<offload::PageAllocator> pages = nullptr;
};

// Reads whole blocks of kBlockBytes of files with checksums, several chunks
// ahead of what it hands out. A block is read once if ranges come in the order
// of their files and offsets, also over several calls. One thread uses it; the
// reader's own threads read chunks and verify them.
class RangeReader {
 public:
  // The files open at a time, besides those that are being read. Each has up to
  // two descriptors, of usually 1024 per process, and all ranks of a process
  // have readers.
  static constexpr int kMostOpenFiles = 16;

  // Called with the bytes of `ranges[range]` from `position` on, range after
  // range, each in order.
  using Take = absl::FunctionRef<absl::Status(size_t range, int64_t position,
                                              absl::Span<const char> bytes)>;

  // Opens nothing yet. `files` outlives the reader. ResourceExhausted: no
  // memory.
  static absl::StatusOr<std::unique_ptr<RangeReader>> Create(
      FileSystem& files, std::vector<SourceFile> sources,
      RangeReaderOptions options);
  RangeReader(const RangeReader&) = delete;
  RangeReader& operator=(const RangeReader&) = delete;
  ~RangeReader() = default;

  const std::string& PathOf(int64_t file) const { return sources_[file].path; }
  // Returns the bytes of a file. Errors are those of Read().
  absl::StatusOr<int64_t> SizeOf(int64_t file);

  // Reads `ranges`, whose files are indices of sources, and hands them to
  // `take`. DataLoss, naming the file and its bytes: a block differs from its
  // checksum, or the file from its size. OutOfRange: a sound file does not have
  // the range. Other errors are those of FileSystem and of `take`. What was
  // handed out before an error is good.
  //
  // The bytes handed out stay until `before_reuse` is called, if that is not
  // null, and the last of them until the next call: a device may copy them
  // meanwhile. An error of `before_reuse` ends the read.
  absl::Status Read(
      absl::Span<const FilePlace> ranges, Take take,
      const std::function<absl::Status()>& before_reuse = nullptr);

 private:
  // The next byte that is wanted, in a list of ranges.
  struct Cursor {
    size_t range = 0;
    int64_t position = 0;
  };
  // Bytes [begin, end) of a file, in `memory`.
  struct Chunk {
    char* memory = nullptr;
    std::shared_ptr<File> file;  // while it is read
    int64_t source = -1;
    int64_t begin = 0;
    int64_t end = 0;
    bool read = false;
    absl::Status status;
  };

  RangeReader(FileSystem& files, std::vector<SourceFile> sources,
              RangeReaderOptions options, offload::PageMemory memory);

  // Opens the file of a source, unless it is open, and checks its size; closes
  // the one that was opened first.
  absl::StatusOr<std::shared_ptr<File>> Open(int64_t source);
  absl::Status CheckSize(int64_t source, int64_t bytes) const;
  // Hands what `chunk` has from `cursor` on to `take`, and moves `cursor`.
  static absl::Status TakeFrom(const Chunk& chunk,
                               absl::Span<const FilePlace> ranges,
                               Cursor& cursor, Take take);
  // Makes `chunk` what is to be read from `cursor` on, and moves `cursor`.
  void Plan(absl::Span<const FilePlace> ranges, Cursor& cursor, Chunk& chunk);
  // Starts as many reads as there is memory for.
  absl::Status StartReads(absl::Span<const FilePlace> ranges, Cursor& cursor);
  absl::Status ReadChunk(const Chunk& chunk) const;
  // Makes the next one of pending_ current_.
  absl::Status AwaitNext();
  absl::Status ReadAll(absl::Span<const FilePlace> ranges, Take take,
                       const std::function<absl::Status()>& before_reuse);

  FileSystem& files_;
  const std::vector<SourceFile> sources_;
  const RangeReaderOptions options_;
  const offload::PageMemory memory_;
  std::vector<std::shared_ptr<File>> open_;  // by source; null: closed
  std::deque<int64_t> opened_;               // those that are open, in order
  std::vector<int64_t> sizes_;               // by source; -1: not opened yet
  std::vector<Chunk> chunks_;                // `read` and `status` need mutex_
  std::vector<Chunk*> free_;
  std::deque<Chunk*> pending_;
  Chunk* current_ = nullptr;  // handed out last

  absl::Mutex mutex_;
  IoThreads threads_;  // the last member: ends first
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_RANGE_READER_H_
