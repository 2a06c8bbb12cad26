// Memory between a thread that copies values and one that writes them to files.
#ifndef CHECKPOINT_SAVE_STAGING_RING_H_
#define CHECKPOINT_SAVE_STAGING_RING_H_

#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "offload/page_memory.h"

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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_STAGING_RING_H_
