// Is a checkpoint's folder what its manifest says?
#ifndef CHECKPOINT_COMMIT_VERIFY_H_
#define CHECKPOINT_COMMIT_VERIFY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/commit/manifest.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

struct Problem {
  enum class Kind {
    kMissing,
    kExtra,    // the manifest does not have it
    kShorter,  // cut off
    kLonger,
    kDamaged,     // other bytes
    kUnreadable,  // the disk says so, or it is no file
  };

  Kind kind = Kind::kMissing;
  std::string file;  // relative to the folder
  std::string text;  // "model.safetensors: MiB [5, 7) are damaged"
};

// All problems that can be seen without reading the files.
absl::StatusOr<std::vector<Problem>> CompareSizes(FileSystem& files,
                                                  const std::string& folder,
                                                  const Manifest& manifest);

// All problems; reads every byte, in O(buffer) memory. `progress`, which may be
// null, is told now and then how many bytes of how many are done.
absl::StatusOr<std::vector<Problem>> VerifyFiles(
    FileSystem& files, const std::string& folder, const Manifest& manifest,
    const std::function<void(int64_t done, int64_t total)>& progress);

// OK for none; otherwise DataLoss with all of them, and what to do.
absl::Status ProblemsStatus(absl::string_view folder,
                            const std::vector<Problem>& problems);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_VERIFY_H_
