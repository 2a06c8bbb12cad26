// The saves of one training: values are written from where they are, or copied
// and written by a thread.
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
