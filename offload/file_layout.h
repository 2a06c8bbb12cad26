// The layout of a file store's file, what the store knows about each region and
// block, and its operations.
#ifndef OFFLOAD_FILE_LAYOUT_H_
#define OFFLOAD_FILE_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
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

// Orders transfers of the same block: reads run together, a write runs alone,
// and nobody overtakes. User::writes says what a user does. Thread-compatible.
template <typename User>
class BlockOrder {
 public:
  // Returns whether `user` may start at once; otherwise a Leave() adds it to
  // `next`.
  bool Enter(const void* block, User* user) {
    Line& line = lines_[block];
    if (line.waiting.empty() && line.Admits(*user)) {
      line.Admit(*user);
      return true;
    }
    line.waiting.push_back(user);
    return false;
  }

  // Ends `user`, which had started, and adds those that may start to `next`.
  void Leave(const void* block, const User& user, std::vector<User*>& next) {
    const auto found = lines_.find(block);
    FSDP_CHECK(found != lines_.end());
    Line& line = found->second;
    line.Release(user);
    while (!line.waiting.empty() && line.Admits(*line.waiting.front())) {
      line.Admit(*line.waiting.front());
      next.push_back(line.waiting.front());
      line.waiting.pop_front();
    }
    if (!line.writing && line.reading == 0) lines_.erase(found);
  }

  bool empty() const { return lines_.empty(); }

 private:
  struct Line {
    bool Admits(const User& user) const {
      return !writing && !(user.writes && reading > 0);
    }
    void Admit(const User& user) {
      if (user.writes) {
        writing = true;
      } else {
        ++reading;
      }
    }
    void Release(const User& user) {
      if (user.writes) {
        writing = false;
      } else {
        --reading;
      }
    }

    bool writing = false;
    int64_t reading = 0;
    std::deque<User*> waiting;
  };

  // Has only blocks that somebody uses.
  absl::flat_hash_map<const void*, Line> lines_;
};

}  // namespace fsdp::offload

#endif  // OFFLOAD_FILE_LAYOUT_H_
