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

// One write of a block. Generations count the writes; 0 means never written,
// that is zeros.
struct Version {
  uint32_t generation = 0;
  uint32_t checksum = 0;
};

// One block of a region. In a file that is kept or can be rolled back it has
// two places, else one. The last commit (a flush that ended well) is never
// written over: the first write after it goes to the other place.
struct Block {
  Version current;   // what a read must find, in `place`
  Version replaced;  // what `place` held before; stale if found again
  Version other;     // what the other place holds
  uint8_t place = 0;
  bool committed = false;  // `current` is part of the last commit
  bool damaged = false;    // a write has failed, and no later one has succeeded

  void Commit() { committed = current.generation > 0; }
  // Goes back to the last commit, or to zeros if the block is not part of it.
  void RollBack() {
    damaged = false;
    if (committed) return;
    if (other.generation > 0) place = static_cast<uint8_t>(1 - place);
    // Without a commit, the other place has never been written.
    current = std::exchange(other, Version());
    replaced = Version();
    Commit();
  }
};

struct StoredRegion {
  StoredRegion(std::string name, int64_t bytes, int64_t offset,
               int64_t block_bytes)
      : name(std::move(name)),
        bytes(bytes),
        offset(offset),
        block_bytes(block_bytes),
        blocks((bytes + block_bytes - 1) / block_bytes) {}

  // Returns the block's own bytes, fewer than block_bytes at the end of the
  // region.
  int64_t BytesOf(int64_t block) const {
    return std::min(block_bytes, bytes - block * block_bytes);
  }

  const std::string name;
  const int64_t bytes;
  const int64_t offset;  // in each of the file's places
  const int64_t block_bytes;
  std::vector<Block> blocks;
};

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
  std::string queue_notes;  // for people
  PageMemory bounce;        // PieceRunner::BounceBytes()
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
