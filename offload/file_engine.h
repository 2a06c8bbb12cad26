// The thread that does the work of a file store: what it knows about each
// region and block, its operations, and how it moves pieces of blocks between
// callers' memory and the file.
#ifndef OFFLOAD_FILE_ENGINE_H_
#define OFFLOAD_FILE_ENGINE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "offload/commit_record.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"
#include "offload/system_calls.h"

namespace fsdp::offload {

struct FileOperation;

// The part of an operation that lies in one block. Only the engine's thread
// uses it.
struct Piece : IoRequest {
  enum class Phase { kReading, kMerging, kWriting };

  FileOperation* operation = nullptr;
  Block* block = nullptr;
  int64_t index = 0;  // of the block
  int64_t begin = 0;  // in the block
  int64_t end = 0;
  char* user = nullptr;    // the caller's memory for `begin`
  char* bounce = nullptr;  // a block of the engine's memory, or null
  Phase phase = Phase::kReading;
  bool writes = false;
  bool prepared = false;  // `next` has its checksum
  Version next;           // of a write
};

// A read, a write or a flush, from the call to its end.
struct FileOperation {
  enum class Kind { kRead, kWrite, kFlush };

  Kind kind = Kind::kRead;
  std::shared_ptr<StoredRegion> region;  // of a read or a write
  int64_t offset = 0;
  char* data = nullptr;
  int64_t bytes = 0;
  // The regions that the store has at a flush.
  std::vector<std::shared_ptr<StoredRegion>> regions;
  // The engine calls this before anybody who waits learns of the end.
  std::function<void(const absl::Status&)> when_over;

  void Finish(absl::Status status) {
    if (when_over != nullptr) when_over(status);
    when_over = nullptr;
    absl::MutexLock lock(&mutex_);
    result_ = std::move(status);
    over_ = true;
  }

  // Returns the result, or DeadlineExceeded.
  absl::Status Wait(absl::Time deadline) {
    absl::MutexLock lock(&mutex_);
    // A deadline in the infinite past asks and does not wait.
    if (over_ ||
        (deadline > absl::InfinitePast() &&
         mutex_.AwaitWithDeadline(absl::Condition(&over_), deadline))) {
      return result_;
    }
    const std::string what =
        kind == Kind::kFlush
            ? "flush"
            : absl::StrCat(kind == Kind::kRead ? "read" : "write", " region '",
                           region->name, "', ", bytes, " bytes from offset ",
                           offset, " on");
    return absl::DeadlineExceededError(absl::StrCat(
        what,
        ": not done at the deadline, and still running; wait longer, "
        "or see what keeps the device busy"));
  }

  // The rest is used by the engine's thread only.
  std::vector<Piece> pieces;
  int64_t pieces_left = 0;
  absl::Status first_error;
  std::shared_ptr<FileOperation> self;  // while the engine has it

 private:
  absl::Mutex mutex_;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status result_ ABSL_GUARDED_BY(mutex_);
};

// The caller's side of an operation.
class FileTransfer : public Transfer {
 public:
  explicit FileTransfer(std::shared_ptr<FileOperation> operation)
      : operation_(std::move(operation)) {}
  ~FileTransfer() override { Wait(absl::InfiniteFuture()).IgnoreError(); }

  absl::Status Wait(absl::Time deadline) final {
    return operation_->Wait(deadline);
  }

 private:
  const std::shared_ptr<FileOperation> operation_;
};

// Orders pieces of the same block: reads run together, a write runs alone, and
// nobody overtakes. Thread-compatible.
class BlockOrder {
 public:
  // Returns whether `piece` may start at once; otherwise a Leave() adds it to
  // `next`.
  bool Enter(Piece* piece) {
    Line& line = lines_[piece->block];
    if (line.waiting.empty() && line.Admits(*piece)) {
      line.Admit(*piece);
      return true;
    }
    line.waiting.push_back(piece);
    return false;
  }

  // Ends `piece`, which had started, and adds those that may start to `next`.
  void Leave(const Piece& piece, std::vector<Piece*>& next) {
    const auto found = lines_.find(piece.block);
    FSDP_CHECK(found != lines_.end());
    Line& line = found->second;
    (piece.writes ? line.writing : line.reading) -= 1;
    while (!line.waiting.empty() && line.Admits(*line.waiting.front())) {
      line.Admit(*line.waiting.front());
      next.push_back(line.waiting.front());
      line.waiting.pop_front();
    }
    if (line.writing == 0 && line.reading == 0) lines_.erase(found);
  }

  bool empty() const { return lines_.empty(); }

 private:
  struct Line {
    bool Admits(const Piece& piece) const {
      return writing == 0 && !(piece.writes && reading > 0);
    }
    void Admit(const Piece& piece) { (piece.writes ? writing : reading) += 1; }

    int64_t writing = 0;  // at most 1
    int64_t reading = 0;
    std::deque<Piece*> waiting;
  };

  // Has only blocks that somebody uses.
  absl::flat_hash_map<const Block*, Line> lines_;
};

// The parts that the thread works with.
struct FileEngineParts {
  std::unique_ptr<const FileLayout> layout;
  std::unique_ptr<IoQueue> queue;
  std::string queue_notes;  // for people
  PageMemory bounce;        // FileEngine::BounceBytes()
  // For a kept file: its log, the last commit, and the other record that may be
  // complete: of the commit before, or of an unfinished one.
  std::optional<CommitLog> log;
  int64_t commit = 0;
  std::optional<int64_t> other_record;
};

// Does the operations of a file store in a thread, which alone uses blocks,
// their order and their tables while an operation is under way. A flush waits
// for the operations before it and holds back those after it.
//
// A piece that is a whole block in memory that starts at a page goes straight
// to the file and back. Any other piece goes through a block of the engine's
// memory, which a write first fills with the rest of the block. Each block that
// is read is compared with the checksum of what was last written there.
class FileEngine {
 public:
  // Returns the bytes of FileEngineParts::bounce: a block for each request in
  // flight.
  static int64_t BounceBytes(const FileLayout& layout, int depth) {
    return depth * layout.header.block_bytes;
  }

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
  // Handles requests that are over.
  void Land(const std::vector<IoRequest*>& over);
  void PieceIsOver(Piece& piece, const absl::Status& result);
  static void Finish(FileOperation& operation);
  // Runs the operation that has to run alone, if there is one and nothing runs.
  bool RunAlone();
  absl::Status Flush(const FileOperation& flush);
  absl::Status WriteCommit(const FileOperation& flush);

  // --- Of one piece ---------------------------------------------------------

  bool HasRoom() const {
    return in_flight_ < parts_.queue->depth() && !bounces_.empty();
  }
  // Does what can be done for a piece before there is room for it.
  void Prepare(Piece& piece) const;
  // Start a piece when there is room. Return its result if it is over at once,
  // and nothing while a request of it is in flight.
  std::optional<absl::Status> BeginRead(Piece& piece);
  std::optional<absl::Status> BeginWrite(Piece& piece);
  // Goes on with a piece whose request is over.
  void Continue(Piece& piece);
  // Puts the caller's bytes into the block that was read for them.
  absl::Status Merge(Piece& piece);
  // Start a request for the whole block.
  void StartRead(Piece& piece);
  void StartWrite(Piece& piece, char* data);
  void StartRequest(Piece& piece, IoRequest::Kind kind, int place, char* data);
  absl::Status FinishRead(Piece& piece);
  absl::Status FinishWrite(Piece& piece);
  // Compares the whole block at `data` with its checksum.
  absl::Status Verify(const Piece& piece, const char* data) const;
  absl::Status Moved(const Piece& piece) const;
  // Returns whether the next write of the block goes to its other place.
  bool ChangesPlace(const Piece& piece) const {
    return layout().places == 2 && piece.block->committed;
  }
  void TakeBounce(Piece& piece);

  FileEngineParts parts_;
  std::vector<char*> bounces_;  // those that no piece has
  int in_flight_ = 0;
  BlockOrder order_;
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
