// Saves one checkpoint, from planned ranges to a committed folder.
#ifndef CHECKPOINT_SAVE_SAVE_JOB_H_
#define CHECKPOINT_SAVE_SAVE_JOB_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/checkpoint_list.h"
#include "checkpoint/commit/save_layout.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_plan.h"
#include "comm/communicator.h"

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
  // A group that nobody else uses meanwhile; null: a single rank.
  comm::Communicator* ranks = nullptr;
  RangeWriterOptions writer;
  absl::Duration timeout;  // limits each wait for an answer of other ranks
  absl::Duration stall_timeout = absl::InfiniteDuration();  // for each disk
  Retention retention;
  bool overwrite = false;

  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
  int world_size() const { return ranks == nullptr ? 1 : ranks->world_size(); }
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

// Writes all of the plan's ranges. Gets the writer, or the error if there is
// none.
using RangeFeed =
    std::function<absl::Status(const absl::StatusOr<RangeWriter*>& writer)>;

// Writes this rank's part, tells the others, and returns the same on all ranks:
// OK when rank 0 has committed all of it, or the error of the lowest rank that
// has one. After an error nothing of it is left, unless the text says
// otherwise. Calls `feed` once in any case.
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

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVE_JOB_H_
