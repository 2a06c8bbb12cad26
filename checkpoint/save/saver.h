// Saves checkpoints, from planned ranges to a committed folder: one
// (RunSave()), and those of a training (Saver), whose values are written from
// where they are or copied and written by a thread.
#ifndef CHECKPOINT_SAVE_SAVER_H_
#define CHECKPOINT_SAVE_SAVER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/files/file_system.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/save/save_plan.h"
#include "offload/page_memory.h"

namespace fsdp::checkpoint {

// The place of a checkpoint, and the ranks that save it. All of it outlives the
// save.
struct SaveContext {
  FileSystem* files = nullptr;
  std::string root;
  std::string token;  // rank 0's CheckpointFolder::token(), on all ranks
  // Only rank 0 has it. Null on the others, and where SaveJob::mine is an error
  // because an earlier save still uses it.
  CheckpointFolder* folder = nullptr;
  CommitBy commit_by = CommitBy::kRename;  // as the folder's
  Together together;  // in a group that nobody else uses meanwhile
  RangeWriterOptions writer;
  absl::Duration stall_timeout = absl::InfiniteDuration();  // for each disk
  Retention retention;
  bool overwrite = false;
};

struct SaveJob {
  int64_t step = 0;
  // The error if this rank has nothing to save, which all ranks return then.
  absl::Status mine;
  // The error if asking the other ranks has failed, so that there is no plan
  // though `mine` is OK.
  absl::Status others;
  SavePlan plan;
  int64_t bytes_to_write = 0;  // all of the plan that this rank writes
  // A safetensors file of this rank, written only if its values differ from
  // rank 0's.
  std::string buffers_file;
};

// Writes all of the plan's ranges. Gets the writer, or at once the error if
// there is none: other ranks may still write for long.
using RangeFeed =
    std::function<absl::Status(const absl::StatusOr<RangeWriter*>& writer)>;

// Writes this rank's part, tells the others, and returns the same on all ranks:
// OK when rank 0 has committed all of it, or the error of the lowest rank that
// has one. After an error nothing of it is left, unless the text says
// otherwise. Calls `feed` once, unless something fails before.
//
// Ranks wait for each other in rounds: a slow one costs time. If a rank's disk
// does not get on for `stall_timeout`, the save fails on all by
// DeadlineExceeded, nobody waits for that rank, and `on_given_up` is called
// while this rank's own calls are still under way.
//
// There are two exchanges; one more if ranks' buffers differ; one more, which
// finds the difference, if their plans do; and one before anything is written
// if checkpoints are committed by manifests, in which all wait until rank 0 has
// removed what has the folder's name.
absl::Status RunSave(
    const SaveContext& context, const SaveJob& job, const RangeFeed& feed,
    const std::function<void(const absl::Status&)>& on_given_up = nullptr);

// Memory through which the values of one save go to the disk: one thread stages
// them, another writes them, and what is written makes room.
class StagingRing {
 public:
  explicit StagingRing(offload::PageMemory memory)
      : memory_(std::move(memory)) {}
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  int64_t capacity() const { return memory_.bytes(); }

  // Copies all of `plan.ranges`, cast for the files; when it returns, the
  // values may change. While there is no room it waits for the other thread, at
  // most `timeout` each time: DeadlineExceeded, with "`what`: " in front. Its
  // errors end WriteTo(), too.
  absl::Status Stage(const SavePlan& plan, absl::Duration timeout,
                     absl::string_view what);
  // Ends it with `status`. To be called instead of Stage() if there is nothing
  // to stage.
  void Abandon(const absl::Status& status);
  // Writes until Stage() or Abandon() has ended, or it is closed, as by an
  // error of its own.
  absl::Status WriteTo(RangeWriter& writer);

  // Does nothing if `reason` is OK. Otherwise Stage() fails with it when it
  // needs room.
  void Close(const absl::Status& reason);
  // Its memory, for the next save. Nobody uses the ring any more.
  offload::PageMemory TakeMemory() { return std::move(memory_); }

 private:
  struct Part {
    FilePlace place;
    const char* bytes;
  };
  // Returns memory for some of `bytes`.
  absl::StatusOr<absl::Span<char>> AwaitRoom(int64_t bytes, absl::Time deadline,
                                             absl::string_view what);
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !closed_.ok() || staged_ - written_ < capacity();
  }
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return end_.has_value() || !parts_.empty();
  }

  offload::PageMemory memory_;
  absl::Mutex mutex_;
  // Bytes from the beginning on, round after round.
  int64_t staged_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t written_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Part> parts_ ABSL_GUARDED_BY(mutex_);  // those between
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
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

  // Returns when all of the plan's values are copied, to at most
  // `staging_bytes` of memory, which is kept for the next time. If they fit,
  // writing begins when they are copied, so that it does not slow copying;
  // otherwise as soon as it can. If that is 0, or there is no such memory, it
  // returns when all is written.
  void Save(const SaveContext& context, SaveJob job, int64_t staging_bytes);
  // Waits until the last save has ended; returns nothing if none was begun
  // since the last Wait().
  std::optional<Ended> Wait();

 private:
  // A save and all that its threads use.
  class Writing;

  void Begin(const SaveContext& context, SaveJob job);

  std::unique_ptr<Writing> writing_;  // null: none since Wait()
  std::unique_ptr<Writing> stuck_;    // given up, and still running
  // Steps that have failed while stuck_ had the folder.
  std::vector<int64_t> left_;
  offload::PageMemory memory_;  // of the last ring, or none
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVER_H_
