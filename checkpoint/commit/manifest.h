// What a committed checkpoint consists of: manifest.json.
#ifndef CHECKPOINT_COMMIT_MANIFEST_H_
#define CHECKPOINT_COMMIT_MANIFEST_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
// Beside it where the checkpoint is of a line of training that was given up,
// in folders that commit by manifests.
inline constexpr char kGivenUpName[] = ".given-up";

struct Manifest {
  int64_t step = 0;
  // By name relative to the checkpoint's folder, "optimizer/state.json".
  std::map<std::string, FileSums> files;

  friend bool operator==(const Manifest& a, const Manifest& b) {
    return a.step == b.step && a.files == b.files;
  }
};

// InvalidArgument unless `name` can be a file of a checkpoint: one file name,
// or one in one folder; no "..", nothing absolute, no control characters, no
// backslash; not the manifest itself, nor kGivenUpName.
absl::Status CheckFileName(absl::string_view name);

// One line of JSON:
//   {"format": "libtorch_fsdp checkpoint", "version": 1, "step": 7,
//    "block_bytes": 1048576, "files": {"model.safetensors": {"bytes": 3,
//    "crc32c": "364b3fb7", "blocks": "364b3fb7"}}, "crc32c": "..."}
// `blocks` has eight digits for each block; the last checksum is that of the
// text in front of `, "crc32c": `.
std::string FormatManifest(const Manifest& manifest);

// DataLoss, naming `path` and what is wrong, for anything that FormatManifest()
// does not make; Unimplemented for a later version.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view path);

// Of a checkpoint's folder. NotFound: it was never committed.
absl::StatusOr<Manifest> ReadManifest(FileSystem& files,
                                      const std::string& folder);

// Is a checkpoint's folder what its manifest says?

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

#endif  // CHECKPOINT_COMMIT_MANIFEST_H_
