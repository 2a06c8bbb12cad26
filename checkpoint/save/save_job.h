// One checkpoint, from planned ranges to a committed folder.
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
#include "checkpoint/commit/commit_by.h"
#include "checkpoint/files/file_system.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_plan.h"
#include "comm/communicator.h"

namespace fsdp::checkpoint {

// Where to, and with whom. All of it outlives the save.
struct SaveContext {
  FileSystem* files = nullptr;
  std::string root;
  std::string token;  // CheckpointFolder::token(), on all ranks
  // Of rank 0; null on the others, and where SaveJob::mine is an error and
  // somebody else has it.
  CheckpointFolder* folder = nullptr;
  CommitBy commit_by = CommitBy::kRename;  // as the folder's
  // A group of its own, used by nobody else meanwhile; null: a single rank.
  comm::Communicator* ranks = nullptr;
  RangeWriterOptions writer;
  absl::Duration timeout;  // of each wait for an answer of other ranks
  absl::Duration stall_timeout = absl::InfiniteDuration();  // of each disk
  Retention retention;
  bool overwrite = false;

  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
  int world_size() const { return ranks == nullptr ? 1 : ranks->world_size(); }
};

struct SaveJob {
  int64_t step = 0;
  // Why this rank has nothing to save: all return it then.
  absl::Status mine;
  // Why there is no plan where `mine` is OK: what became of asking the others.
  absl::Status others;
  SavePlan plan;
  int64_t bytes_to_write = 0;  // all that the plan has for this rank
  // A safetensors file of this rank, kept where the values in it differ from
  // rank 0's.
  std::string buffers_file;
};

// Writes all of the plan's ranges; gets the writer, or why there is none.
using RangeFeed =
    std::function<absl::Status(const absl::StatusOr<RangeWriter*>& writer)>;

// Writes this rank's part, tells the others, and returns when rank 0 has
// committed all of it, or with the error of the lowest rank that has one, on
// all ranks; then nothing of it is left. Ranks wait for each other in rounds: a
// slow one costs time, one whose disk does not get on for `stall_timeout` fails
// the save on all, by DeadlineExceeded, and nobody waits for it any longer;
// `on_given_up` hears of it while this rank's own calls are still under way.
// Calls `feed` once, whatever happens.
// Two exchanges, one more where ranks' buffers differ, one that finds the
// difference where their plans do, and one before anything is written where
// checkpoints are committed by manifests: all wait there for rank 0, which
// removes what has the folder's name.
absl::Status RunSave(
    const SaveContext& context, const SaveJob& job, const RangeFeed& feed,
    const std::function<void(const absl::Status&)>& on_given_up = nullptr);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVE_JOB_H_
