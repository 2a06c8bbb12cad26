// The files of a run that outlive it, opened on all ranks at one stage.
#ifndef FSDP_RESTING_KEPT_FILES_H_
#define FSDP_RESTING_KEPT_FILES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "offload/file_store.h"

namespace fsdp {

// What a commit is of: a step, finished, or what it was afterwards when the
// next one began. All ranks go through the same stages. Its bytes are this
// region of each file; without it, all 0.
inline constexpr char kStageRegion[] = "stage";
struct KeptStage {
  int64_t number = 0;         // one more for every commit that was tried
  int64_t finished_step = 0;  // 0: nothing of use
  // Another one for each OpenKeptFiles(): two copies of a run that both went on
  // have stages of the same numbers.
  uint64_t session = 0;

  friend bool operator==(const KeptStage& a, const KeptStage& b) {
    return a.number == b.number && a.finished_step == b.finished_step &&
           a.session == b.session;
  }
};

struct KeptFiles {
  std::vector<std::unique_ptr<offload::FileStore>> stores;  // as `files`
  KeptStage stage;                                          // what they hold
  uint64_t session = 0;  // for the stages to come
};

// The name of this rank's file: "run.optimizer.3-of-8".
std::string KeptFileName(absl::string_view run, absl::string_view kind,
                         int rank, int world_size);

// Opens `files`, named by KeptFileName(), or makes those that are not there.
// Collective. A rank may have been killed between the commits of others: all go
// back to the last stage that every file has, which is at most one commit.
//
// FailedPrecondition on all ranks where there is none, and for files that do
// not belong together: of different runs, by the number that all files of a run
// get when they are made, of copies of a run that both went on, of another
// rank, of a run on more or fewer ranks. Other errors as FileStore's.
absl::StatusOr<KeptFiles> OpenKeptFiles(
    const std::vector<offload::FileStoreOptions>& files,
    comm::Communicator& world, absl::Duration timeout);

}  // namespace fsdp

#endif  // FSDP_RESTING_KEPT_FILES_H_
