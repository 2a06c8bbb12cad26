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
#include "absl/synchronization/mutex.h"
#include "offload/commit_log.h"
#include "offload/file_layout.h"
#include "offload/io_queue.h"
#include "offload/page_memory.h"
#include "offload/piece_runner.h"

namespace fsdp::offload {

// What the thread works with.
struct FileEngineParts {
  std::unique_ptr<const FileLayout> layout;
  std::unique_ptr<IoQueue> queue;
  PageMemory bounce;  // PieceRunner::BounceBytes()
  // Of a file that is kept: the last commit, and which other record may be
  // whole: of the commit before it, or of one that was not finished.
  std::optional<CommitLog> log;
  int64_t commit = 0;
  std::optional<int64_t> other_record;
};

// Blocks, their order and their tables belong to the thread alone, unless
// nothing was started that is not over. A flush
// waits for what came before it and holds back what comes after it.
class FileEngine {
 public:
  explicit FileEngine(FileEngineParts parts);
  // Before anything else. ResourceExhausted: no thread can be started.
  absl::Status Begin();
  // After all operations.
  ~FileEngine();

  // Thread-safe.
  void Start(std::shared_ptr<FileOperation> operation);

  const FileLayout& layout() const { return *parts_.layout; }

 private:
  void Run();
  // Takes in what was started since; false when there is nothing left to do.
  bool TakeNew();
  void Admit(std::shared_ptr<FileOperation> operation);
  void Split(const std::shared_ptr<FileOperation>& operation);
  void StartPieces();
  // What is ready and will be started next.
  void PreparePieces();
  void Continue(Piece& piece);
  // Requests that are over.
  void Land(const std::vector<IoRequest*>& over);
  void PieceIsOver(Piece& piece, const absl::Status& result);
  static void Finish(FileOperation& operation);
  // Does what has to be alone, if something waits for that and may go.
  bool RunAlone();
  // Before blocks are written over that it names.
  absl::Status DropOtherRecord();
  static void Damage(const FileOperation& write);
  absl::Status Flush(const FileOperation& flush);
  absl::Status WriteCommit(const FileOperation& flush);

  FileEngineParts parts_;
  PieceRunner runner_;
  BlockOrder<Piece> order_;
  std::deque<Piece*> ready_;
  std::vector<Piece*> landed_;
  int64_t running_ = 0;  // operations, but for alone_
  // A flush, or a write that is the first since one: it has to wait until
  // nothing runs, and `held_` waits for it.
  std::shared_ptr<FileOperation> alone_;
  std::deque<std::shared_ptr<FileOperation>> held_;
  absl::Status broken_;  // why no flush can be trusted any more

  absl::Mutex mutex_;
  std::vector<std::shared_ptr<FileOperation>> new_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_ENGINE_H_
