// Checkpoints of a few small files, for tests.
#ifndef CHECKPOINT_COMMIT_TESTING_SAVE_FILES_H_
#define CHECKPOINT_COMMIT_TESTING_SAVE_FILES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/files/file_system.h"
#include "checkpoint/commit/checkpoint_folder.h"
#include "checkpoint/commit/manifest.h"

namespace fsdp::checkpoint::testing {

// By name relative to a checkpoint's folder.
using Contents = std::map<std::string, std::string>;

// Returns "model.safetensors", "optimizer/exp_avg.safetensors" and
// "trainer.json", whose bytes depend on `version`.
Contents ContentsOf(uint32_t version);

// Writes files into `folder`, which must exist, by a RangeWriter, as a rank
// does. `in_order` is that of RangeWriterOptions.
absl::StatusOr<Manifest> WriteFiles(FileSystem& files,
                                    const std::string& folder, int64_t step,
                                    const Contents& contents,
                                    bool in_order = false);

// Calls Begin(), writes the files and calls Commit().
absl::Status Save(FileSystem& files, CheckpointFolder& folder, int64_t step,
                  const Contents& contents, bool overwrite = false);

// Returns the contents of a committed checkpoint, or an error if they are not
// what its manifest says.
absl::StatusOr<Contents> Load(FileSystem& files, const std::string& folder);

// Returns the steps of the checkpoints in `root`, in order; the test fails if
// they cannot be listed.
std::vector<int64_t> StepsIn(FileSystem& files, const std::string& root);

// Returns the step of the latest checkpoint, or -1 if there is none.
int64_t LatestIn(FileSystem& files, const std::string& root);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_COMMIT_TESTING_SAVE_FILES_H_
