// The thread that does the work of a file store.
#ifndef OFFLOAD_FILE_ENGINE_H_
#define OFFLOAD_FILE_ENGINE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "offload/commit_record.h"
#include "offload/file_layout.h"
#include "offload/page_memory.h"
#include "offload/piece_runner.h"
#include "offload/system_calls.h"

// The header and the commits of a kept file, on the disk.

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

// The parts that the thread works with.
struct FileEngineParts {
  std::unique_ptr<const FileLayout> layout;
  std::unique_ptr<IoQueue> queue;
  PageMemory bounce;  // PieceRunner::BounceBytes()
  // For a kept file: its log, the last commit, and the other record that may be
  // complete: of the commit before, or of an unfinished one.
  std::optional<CommitLog> log;
  int64_t commit = 0;
  std::optional<int64_t> other_record;
};

// Does the operations of a file store in a thread, which alone uses blocks,
// their order and their tables while an operation is under way. A flush waits
// for the operations before it and holds back those after it.
class FileEngine {
 public:
  explicit FileEngine(FileEngineParts parts);
  // Starts the thread; call it before anything else. ResourceExhausted: no
  // thread can be started.
  absl::Status Begin();
  // Waits for all operations.
  ~FileEngine();

  // Thread-safe.
  void Start(std::shared_ptr<FileOperation> operation);

  const FileLayout& layout() const { return *parts_.layout; }

 private:
  void Run();
  // Takes new operations; returns false if there is nothing left to do.
  bool TakeNew();
  void Admit(std::shared_ptr<FileOperation> operation);
  void Split(const std::shared_ptr<FileOperation>& operation);
  void StartPieces();
  void Continue(Piece& piece);
  // Handles requests that are over.
  void Land(const std::vector<IoRequest*>& over);
  void PieceIsOver(Piece& piece, const absl::Status& result);
  static void Finish(FileOperation& operation);
  // Runs the operation that has to run alone, if there is one and nothing runs.
  bool RunAlone();
  absl::Status Flush(const FileOperation& flush);
  absl::Status WriteCommit(const FileOperation& flush);

  FileEngineParts parts_;
  PieceRunner runner_;
  BlockOrder<Piece> order_;
  std::deque<Piece*> ready_;
  std::vector<Piece*> landed_;
  int64_t running_ = 0;  // operations, without `alone_`
  // An operation that waits until nothing runs: a flush, or the first write
  // since a flush. `held_` waits for it.
  std::shared_ptr<FileOperation> alone_;
  std::deque<std::shared_ptr<FileOperation>> held_;
  absl::Status broken_;  // why no later flush can be trusted

  absl::Mutex mutex_;
  std::vector<std::shared_ptr<FileOperation>> new_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_ENGINE_H_
