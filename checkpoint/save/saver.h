// Saves of one training: written where the values are, or by a thread from
// copies of them.
#ifndef CHECKPOINT_SAVE_SAVER_H_
#define CHECKPOINT_SAVE_SAVER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "absl/status/status.h"
#include "checkpoint/save/save_job.h"
#include "checkpoint/save/staged_feed.h"
#include "checkpoint/save/staging_ring.h"

namespace fsdp::checkpoint {

// One save is under way at a time: Wait() comes before the next. What goes
// wrong in a save is what Wait() returns, on all ranks.
class Saver {
 public:
  struct Ended {
    int64_t step;
    absl::Status status;
  };

  Saver() = default;
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;
  ~Saver();

  // Returns when all is written.
  void Save(const SaveContext& context, SaveJob job);
  // Returns when all of the plan's values are copied, to `staging_bytes` of
  // memory at most, which are kept for the next time. Where they fit, writing
  // begins when they are copied, so that it does not make copying slower;
  // otherwise as soon as it can. Without that memory: Save().
  void SaveCopies(const SaveContext& context, SaveJob job,
                  int64_t staging_bytes);
  // Until the save that was begun last has ended; nothing if none was begun
  // since.
  std::optional<Ended> Wait();

 private:
  void WriteLive();
  absl::Status Stage();
  bool StartWriter();
  void WriteStaged();

  SaveContext context_;
  std::optional<SaveJob> job_;
  absl::Status result_;  // of writer_, after it has ended
  std::unique_ptr<StagingRing> ring_;
  std::optional<StagedFeed> feed_;
  std::thread writer_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVER_H_
