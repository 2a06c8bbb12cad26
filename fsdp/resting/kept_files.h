// Opens the files that outlive a run (OffloadOptions::keep), on all ranks at
// one stage.
#ifndef FSDP_RESTING_KEPT_FILES_H_
#define FSDP_RESTING_KEPT_FILES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "offload/file_store.h"

namespace fsdp {

// A stage is the state that a commit writes: that of a finished step, or that
// in which the next step began. All ranks go through the same stages. Each file
// has its stage's bytes in this region; if it has none, they are all 0.
inline constexpr char kStageRegion[] = "stage";
struct KeptStage {
  int64_t number = 0;         // rises by one for every commit that is tried
  int64_t finished_step = 0;  // 0: the file holds nothing of use
  // Differs between calls of OpenKeptFiles(), since two copies of a run that
  // both went on have stages of the same numbers.
  uint64_t session = 0;

  friend bool operator==(const KeptStage& a, const KeptStage& b) {
    return a.number == b.number && a.finished_step == b.finished_step &&
           a.session == b.session;
  }
};

struct KeptFiles {
  std::vector<std::unique_ptr<offload::FileStore>> stores;  // in order of files
  KeptStage stage;                                          // what they hold
  uint64_t session = 0;  // for the stages to come
};

// Returns the name of this rank's file: "run.optimizer.3-of-8".
std::string KeptFileName(absl::string_view run, absl::string_view kind,
                         int rank, int world_size);

// Opens `files`, named by KeptFileName(), and makes those that do not exist.
// Collective. Since a rank may have been killed between the commits of others,
// all go back to the last stage that every file has, by at most one commit.
//
// FailedPrecondition on all ranks: there is no such stage, or the files do not
// belong together. They may be of different runs (all files of a run get one
// number when they are made), of copies of a run that both went on, of another
// rank, or of a run on another number of ranks. Other errors are FileStore's.
absl::StatusOr<KeptFiles> OpenKeptFiles(
    const std::vector<offload::FileStoreOptions>& files,
    comm::Communicator& world, absl::Duration timeout);

}  // namespace fsdp

#endif  // FSDP_RESTING_KEPT_FILES_H_
