// Saves of one training: written where the values are, or by a thread from
// copies of them.
#ifndef CHECKPOINT_SAVE_SAVER_H_
#define CHECKPOINT_SAVE_SAVER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/save/save_job.h"
#include "checkpoint/save/staged_feed.h"

namespace fsdp::checkpoint {

// One save is under way at a time: Wait() comes before the next. What goes
// wrong in a save is what Wait() returns, on all ranks. A save that was given
// up while this rank's disk does not answer is over for Wait(), and goes on by
// itself; until the disk has answered, the next ones fail.
class Saver {
 public:
  struct Ended {
    int64_t step;
    absl::Status status;
  };

  Saver();
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;
  // Waits for whatever is under way.
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
  // A save, and all that its threads use.
  class Writing;

  void Begin(const SaveContext& context, SaveJob job);
  void DiscardLeft(const SaveContext& context);

  std::unique_ptr<Writing> writing_;  // null: none since Wait()
  std::unique_ptr<Writing> stuck_;    // given up, and not over yet
  // Steps that have failed while stuck_ had the folder.
  std::vector<int64_t> left_;
  std::unique_ptr<StagingRing> ring_;
};

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_SAVER_H_
