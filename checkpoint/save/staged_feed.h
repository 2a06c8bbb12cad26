// This rank's values on their way to files by way of memory that a thread
// copies them to while another one writes.
#ifndef CHECKPOINT_SAVE_STAGED_FEED_H_
#define CHECKPOINT_SAVE_STAGED_FEED_H_

#include <cstdint>
#include <deque>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_plan.h"
#include "offload/page_memory.h"

// Memory between a thread that copies values and one that writes them to files.

namespace fsdp::checkpoint {

// Spans of one piece of memory, given back in the order in which they were
// taken. One thread takes, one gives back.
class StagingRing {
 public:
  // `bytes` > 0. ResourceExhausted.
  static absl::StatusOr<offload::PageMemory> Allocate(int64_t bytes);
  explicit StagingRing(offload::PageMemory memory);
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  int64_t capacity() const { return memory_.bytes(); }

  // `bytes` in [0, capacity()], side by side, as soon as they are free.
  // DeadlineExceeded; the reason of Close().
  absl::StatusOr<absl::Span<char>> Take(int64_t bytes, absl::Time deadline);
  // The span that was taken first of those that are.
  void GiveBack();
  // Take() fails with `reason`, which is an error, until Open().
  void Close(const absl::Status& reason);
  // Everything was given back.
  void Open();

 private:
  // Positions count all bytes that were ever taken, those that were skipped at
  // the end of the memory included; modulo capacity() they are places.
  struct Wanted {
    const StagingRing* ring;
    int64_t end;
  };
  static bool HasRoom(Wanted* wanted);

  const offload::PageMemory memory_;
  absl::Mutex mutex_;
  int64_t taken_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t given_back_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<int64_t> ends_ ABSL_GUARDED_BY(mutex_);  // of spans that are taken
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

// One thread stages, another one writes what it has staged.
class StagedFeed {
 public:
  // `ring` outlives it, and is nobody else's meanwhile.
  explicit StagedFeed(StagingRing& ring) : ring_(ring) {}
  StagedFeed(const StagedFeed&) = delete;
  StagedFeed& operator=(const StagedFeed&) = delete;

  // Copies all of `plan.ranges`, cast for the files: when it returns, the
  // values may change. Waits for the other thread where the ring has no more
  // room, each time for `timeout` at most. Its errors end the other thread's
  // WriteTo() as well, and the other way round.
  absl::Status Stage(const SavePlan& plan, absl::Duration timeout);
  // Instead of Stage().
  void Abandon(const absl::Status& reason);

  // Until Stage() or Abandon() has ended. Leaves the ring empty. Without a
  // writer, which is an error then, nothing is written.
  absl::Status WriteTo(const absl::StatusOr<RangeWriter*>& writer);

 private:
  struct Part {
    int64_t file;
    int64_t offset;
    absl::Span<char> bytes;  // of the ring
  };

  absl::Status StageRange(const SaveRange& range, absl::Duration timeout);
  void Push(const Part& part);
  void End(const absl::Status& status);
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ended_ || !parts_.empty();
  }

  StagingRing& ring_;
  absl::Mutex mutex_;
  std::deque<Part> parts_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_STAGED_FEED_H_
