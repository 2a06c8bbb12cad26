// Reads ranges of bytes of several files, and trusts none without its checksum.
#ifndef CHECKPOINT_FILES_RANGE_READER_H_
#define CHECKPOINT_FILES_RANGE_READER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/io_threads.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {

struct SourceFile {
  std::string path;
  // What the file should be; has to outlive the reader. Null: nobody knows, as
  // of files that others have written; nothing is verified then.
  const FileSums* sums = nullptr;
};

struct ReadRange {
  int64_t file = 0;  // index of a SourceFile
  int64_t offset = 0;
  int64_t bytes = 0;
};

struct RangeReaderOptions {
  // All the memory that it takes is chunks * chunk_bytes.
  int64_t chunk_bytes = int64_t{4} << 20;  // a multiple of kBlockBytes
  int chunks = 4;                          // at least 2
  Caching caching = Caching::kDirect;
  // The end of the text about a damaged file.
  std::string advice = "load an older checkpoint";
};

// Reads whole blocks of kBlockBytes, where there are checksums, several ahead
// of what is handed out. A block is read once while ranges come in the order of
// their files and offsets, also those of several calls. Used by one thread,
// which verifies what the others have read, block by block as it takes them.
class RangeReader {
 public:
  // At a time, besides those of the chunks that are being read. Each has up to
  // two descriptors, of the 1024 that a process usually may have, and all ranks
  // of a process have readers.
  static constexpr int kMostOpenFiles = 16;

  // Gets the bytes of `ranges[range]` from `position` on; each range in order,
  // one after the other.
  using Take = absl::FunctionRef<absl::Status(size_t range, int64_t position,
                                              absl::Span<const char> bytes)>;

  // Opens nothing yet. `files` has to outlive the reader. InvalidArgument;
  // ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<RangeReader>> Create(
      FileSystem& files, std::vector<SourceFile> sources,
      RangeReaderOptions options);
  RangeReader(const RangeReader&) = delete;
  RangeReader& operator=(const RangeReader&) = delete;
  ~RangeReader() = default;

  const std::string& PathOf(int64_t file) const { return sources_[file].path; }
  // Bytes of a file. The errors are those of Read().
  absl::StatusOr<int64_t> SizeOf(int64_t file);

  // DataLoss, naming the file and its bytes, for what is not as its checksum
  // says or not there; OutOfRange for a range that a sound file does not have;
  // the errors of FileSystem and of `take`. What was handed out before is good.
  absl::Status Read(absl::Span<const ReadRange> ranges, Take take);

 private:
  // Where in a list of ranges: the next byte that is wanted.
  struct Cursor {
    size_t range = 0;
    int64_t position = 0;
  };
  struct OpenFile {
    int64_t source = -1;
    std::shared_ptr<File> file;
  };
  // Bytes [begin, end) of a file, in `memory`.
  struct Chunk {
    char* memory = nullptr;
    std::shared_ptr<File> file;  // while it is read
    int64_t source = -1;
    int64_t begin = 0;
    int64_t end = 0;
    int64_t verified_end = 0;  // nothing before it is left to verify
    bool read = false;
    absl::Status status;
  };

  RangeReader(FileSystem& files, std::vector<SourceFile> sources,
              RangeReaderOptions options, offload::PageMemory memory);

  // Opens the file of a source, unless it is open, and sees how large it is;
  // closes the one that was not used for longest.
  absl::StatusOr<std::shared_ptr<File>> Open(int64_t source);
  absl::Status CheckSize(int64_t source, int64_t bytes) const;
  absl::Status CheckRanges(absl::Span<const ReadRange> ranges);
  // Moves `cursor` past what is in `chunk`, and hands that to `take`.
  absl::Status TakeFrom(Chunk& chunk, absl::Span<const ReadRange> ranges,
                        Cursor& cursor, Take take) const;
  // Makes `chunk` what is to be read for `cursor`, and moves that past it.
  void Plan(absl::Span<const ReadRange> ranges, Cursor& cursor, Chunk& chunk);
  // Starts as many reads as there is memory for.
  absl::Status StartReads(absl::Span<const ReadRange> ranges, Cursor& cursor);
  static absl::Status ReadChunk(const Chunk& chunk);
  // Verifies what is before byte `end` of the file.
  absl::Status Verify(Chunk& chunk, int64_t end) const;
  // The next one of pending_ becomes current_.
  absl::Status AwaitNext();
  absl::Status ReadAll(absl::Span<const ReadRange> ranges, Take take);
  void Drop();

  FileSystem& files_;
  const std::vector<SourceFile> sources_;
  const RangeReaderOptions options_;
  const offload::PageMemory memory_;
  std::list<OpenFile> open_;    // the last used one first
  std::vector<int64_t> sizes_;  // by source; -1: not opened yet
  std::vector<Chunk> chunks_;   // `read` and `status`: by mutex_
  std::vector<Chunk*> free_;
  std::deque<Chunk*> pending_;
  Chunk* current_ = nullptr;  // what was handed out last

  absl::Mutex mutex_;
  IoThreads threads_;  // the last member: ends first
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_FILES_RANGE_READER_H_
