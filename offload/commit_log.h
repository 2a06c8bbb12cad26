// The header and the commits of a file that is kept, on the disk.
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

// Two records take turns: commit n is written over commit n-2, after the blocks
// that it names are on the disk. A process that is killed at any instant leaves
// the record of n whole or torn; a torn one is not taken, and n-1 has lost
// nothing. Used by one thread at a time, while nothing else is in flight; the
// queue is left woken.
class CommitLog {
 public:
  // What one takes of `allocator`.
  static int64_t MemoryBytes(const FileLayout& layout);

  static absl::StatusOr<CommitLog> Make(const FileLayout& layout,
                                        PageAllocator& allocator);

  absl::Status WriteHeader(IoQueue& queue);

  // A commit is Sync(), so that what it names is there, Write(), Sync().
  absl::Status Write(IoQueue& queue, const CommitRecord& record);
  absl::Status Sync(IoQueue& queue, absl::string_view what);

  // Those that are whole, the older one first.
  absl::StatusOr<std::vector<CommitRecord>> ReadAll(IoQueue& queue);

  // There will be no such commit.
  absl::Status Drop(IoQueue& queue, int64_t commit);

 private:
  CommitLog(const FileLayout& layout, PageMemory memory)
      : layout_(&layout), memory_(std::move(memory)) {}

  absl::Status WriteAt(IoQueue& queue, absl::string_view what,
                       absl::string_view bytes, int64_t offset);

  const FileLayout* layout_;
  PageMemory memory_;  // of a record
};

// The header of the file that `queue` reads, found at `path`; `memory` has room
// for it.
absl::StatusOr<FileHeader> ReadHeader(IoQueue& queue, char* memory,
                                      absl::string_view path);

}  // namespace fsdp::offload

#endif  // OFFLOAD_COMMIT_LOG_H_
