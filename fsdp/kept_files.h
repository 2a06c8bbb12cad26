// The files of a run that outlive it, opened on all ranks at one stage.
#ifndef FSDP_KEPT_FILES_H_
#define FSDP_KEPT_FILES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "offload/file_store.h"

namespace fsdp {

// What a commit is of: step n, finished, or what it was afterwards when step
// n + 1 began. All ranks go through the same stages. The number of its stage is
// 8 bytes of this region of each file; without it, 0.
inline constexpr char kStageRegion[] = "stage";
constexpr int64_t StageOf(int64_t finished_step, bool next_begins) {
  return 2 * finished_step + (next_begins ? 1 : 0);
}
constexpr int64_t StepOfStage(int64_t stage) { return stage / 2; }

struct KeptFiles {
  std::vector<std::unique_ptr<offload::FileStore>> stores;  // as `files`
  int64_t stage = 0;  // what they hold; of step 0: nothing of use
};

// Opens `files`, or makes those that are not there. Collective. A rank may have
// been killed between the commits of others: all go back to the last stage
// that every file has, which is at most one commit. FailedPrecondition on all
// ranks where there is none; errors as FileStore's.
absl::StatusOr<KeptFiles> OpenKeptFiles(
    const std::vector<offload::FileStoreOptions>& files,
    comm::Communicator& world, absl::Duration timeout);

}  // namespace fsdp

#endif  // FSDP_KEPT_FILES_H_
