// The header and the commits of a kept file, on the disk.
#ifndef OFFLOAD_COMMIT_LOG_H_
#define OFFLOAD_COMMIT_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "offload/commit_record.h"
#include "offload/file_layout.h"
#include "offload/io_queue.h"
#include "offload/page_memory.h"

namespace fsdp::offload {

// Two records take turns: commit n replaces commit n-2, after the blocks that
// it names are on the disk. A process that is killed at any instant leaves
// record n complete or torn. A torn record is ignored, and commit n-1 is intact
// then. Used by one thread at a time, while nothing else is in flight. Calls
// leave the queue woken.
class CommitLog {
 public:
  // Returns the bytes of `allocator` that a log takes.
  static int64_t MemoryBytes(const FileLayout& layout);

  static absl::StatusOr<CommitLog> Make(const FileLayout& layout,
                                        PageAllocator& allocator);

  absl::Status WriteHeader(IoQueue& queue);

  // To commit is Sync(), so that the blocks it names are on the disk, then
  // Write(), then Sync().
  absl::Status Write(IoQueue& queue, const CommitRecord& record);
  absl::Status Sync(IoQueue& queue, absl::string_view what);

  // Returns the complete records, the older one first.
  absl::StatusOr<std::vector<CommitRecord>> ReadAll(IoQueue& queue);

  // Erases the record of this commit.
  absl::Status Drop(IoQueue& queue, int64_t commit);

 private:
  CommitLog(const FileLayout& layout, PageMemory memory)
      : layout_(&layout), memory_(std::move(memory)) {}

  absl::Status WriteAt(IoQueue& queue, absl::string_view what,
                       absl::string_view bytes, int64_t offset);

  const FileLayout* layout_;
  PageMemory memory_;  // for one record
};

// Reads the header of the file behind `queue`. `path` is for errors; `memory`
// has room for kHeaderBytes.
absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path);

}  // namespace fsdp::offload

#endif  // OFFLOAD_COMMIT_LOG_H_
