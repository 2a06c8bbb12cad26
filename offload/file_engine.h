// The thread that does the work of a file store, and how it moves pieces of
// blocks between callers' memory and the file.
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
#include "offload/commit_record.h"
#include "offload/file_layout.h"
#include "offload/page_memory.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

// A piece that is a whole block in memory that starts at a page goes straight
// to the file and back. Any other piece goes through a block of the runner's
// memory, which a write first fills with the rest of the block. Each block that
// is read is compared with the checksum of what was last written there.
//
// While one piece writes to a block, no other piece of that block may be
// started (BlockOrder). Used by one thread.
class PieceRunner {
 public:
  // Returns the bytes of `bounce`: a block for each request in flight.
  static int64_t BounceBytes(const FileLayout& layout, int depth) {
    return depth * layout.header.block_bytes;
  }

  // All arguments must outlive the runner.
  PieceRunner(const FileLayout& layout, IoQueue& queue,
              const PageMemory& bounce);

  bool HasRoom() const {
    return in_flight_ < queue_.depth() && !bounces_.empty();
  }
  int in_flight() const { return in_flight_; }

  // Does what can be done for a piece before there is room for it.
  void Prepare(Piece& piece) const;
  // Starts a piece; needs HasRoom(). Returns its result if it is over at once,
  // and nothing while a request of it is in flight.
  std::optional<absl::Status> Begin(Piece& piece);
  // Takes a piece whose request is over. Returns false if Continue() will start
  // another request and so must come before the next Begin().
  bool Land(Piece& piece);
  // Goes on with a piece that has landed, and returns as Begin() does.
  std::optional<absl::Status> Continue(Piece& piece);

 private:
  std::optional<absl::Status> BeginRead(Piece& piece);
  std::optional<absl::Status> BeginWrite(Piece& piece);
  void StartRead(Piece& piece, char* data, int64_t begin, int64_t end);
  void StartWrite(Piece& piece, char* data, int64_t begin, int64_t end);
  absl::Status FinishRead(Piece& piece);
  absl::Status FinishWrite(Piece& piece);
  // Compares the whole block at `data` with its checksum.
  absl::Status Verify(const Piece& piece, const char* data) const;
  absl::Status Moved(const Piece& piece) const;
  // Returns whether the next write of the block goes to its other place.
  bool ChangesPlace(const Piece& piece) const {
    return layout_.places == 2 && piece.block->committed;
  }
  static bool GoesStraight(const Piece& piece);
  static bool IsWhole(const Piece& piece) {
    return piece.begin == 0 && piece.end == BlockBytes(piece);
  }
  static int64_t BlockBytes(const Piece& piece) {
    return piece.operation->region->BytesOf(piece.index);
  }
  void TakeBounce(Piece& piece);

  const FileLayout& layout_;
  IoQueue& queue_;
  std::vector<char*> bounces_;  // those that no piece has
  int in_flight_ = 0;
};

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
