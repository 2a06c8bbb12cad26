// The saves of one training: values are written from where they are, or copied
// and written by a thread.
#ifndef CHECKPOINT_SAVE_SAVER_H_
#define CHECKPOINT_SAVE_SAVER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_job.h"
#include "checkpoint/save/save_plan.h"
#include "offload/page_memory.h"
#include "ranges/file_place.h"

// One thread copies this rank's values into memory while another writes them
// from there to files.

namespace fsdp::checkpoint {

// A ring of memory whose spans are given back in the order in which they were
// taken. One thread takes spans, one gives them back.
class StagingRing {
 public:
  explicit StagingRing(offload::PageMemory memory);
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  int64_t capacity() const { return memory_.bytes(); }

  // Returns `bytes`, in [0, capacity()], side by side, as soon as they are
  // free. Errors: DeadlineExceeded, or the reason of Close().
  absl::StatusOr<absl::Span<char>> Take(int64_t bytes, absl::Time deadline);
  // Gives back the oldest of the spans that are taken.
  void GiveBack();
  // Makes Take() fail with `reason`, an error, until Open().
  void Close(const absl::Status& reason);
  // Everything must have been given back.
  void Open();

 private:
  // Positions count all bytes that were ever taken, including those skipped at
  // the end of the memory; modulo capacity() they are places in it.
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

// One thread stages; another writes what is staged.
class StagedFeed {
 public:
  // `ring` outlives it, and nobody else uses it meanwhile.
  explicit StagedFeed(StagingRing& ring) : ring_(ring) {}
  StagedFeed(const StagedFeed&) = delete;
  StagedFeed& operator=(const StagedFeed&) = delete;

  // Copies all of `plan.ranges`, cast for the files; when it returns, the
  // values may change. While the ring is full it waits for the other thread, at
  // most `timeout` each time. Its errors end WriteTo() as well, and the other
  // way round.
  absl::Status Stage(const SavePlan& plan, absl::Duration timeout);
  // Ends it with `status`. To be called instead of Stage() if there is nothing
  // to stage.
  void Abandon(const absl::Status& status);

  // Writes until Stage() or Abandon() has ended, and leaves the ring empty. If
  // `writer` is an error, nothing is written.
  absl::Status WriteTo(const absl::StatusOr<RangeWriter*>& writer);

 private:
  struct Part {
    int64_t file;
    int64_t offset;
    absl::Span<char> bytes;  // of the ring
  };

  absl::Status StageRange(const FilePlace& place, ReadBytes read,
                          absl::Duration timeout);
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ended_ || !parts_.empty();
  }

  StagingRing& ring_;
  absl::Mutex mutex_;
  std::deque<Part> parts_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mutex_);
};

// One save is under way at a time: Wait() comes before the next, and returns on
// all ranks what went wrong in it. If a save was given up while this rank's
// disk does not answer, Wait() takes it as ended, and it goes on by itself;
// until the disk has answered, the next saves fail.
class Saver {
 public:
  struct Ended {
    int64_t step;
    absl::Status status;
  };

  Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;
  // Waits for all that is under way.
  ~Saver();

  // Returns when all is written.
  void Save(const SaveContext& context, SaveJob job);
  // Returns when all of the plan's values are copied, to at most
  // `staging_bytes` of memory, which is kept for the next time. If they fit,
  // writing begins when they are copied, so that it does not slow copying;
  // otherwise as soon as it can. Without that memory it does what Save() does.
  void SaveCopies(const SaveContext& context, SaveJob job,
                  int64_t staging_bytes);
  // Waits until the last save has ended; returns nothing if none was begun
  // since the last Wait().
  std::optional<Ended> Wait();

 private:
  // A save and all that its threads use.
  class Writing;

  void Begin(const SaveContext& context, SaveJob job);
  void DiscardLeft(const SaveContext& context);

  std::unique_ptr<Writing> writing_;  // null: none since Wait()
  std::unique_ptr<Writing> stuck_;    // given up, and still running
  // Steps that have failed while stuck_ had the folder.
  std::vector<int64_t> left_;
  std::unique_ptr<StagingRing> ring_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVER_H_
