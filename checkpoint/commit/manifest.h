// manifest.json: which files a committed checkpoint consists of.
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
#include "base/files/checksums.h"
#include "base/files/file_system.h"

namespace fsdp::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
// A folder that commits by manifests has this file beside the manifest of a
// checkpoint whose line of training was given up.
inline constexpr char kGivenUpName[] = ".given-up";

struct Manifest {
  int64_t step = 0;
  // By name relative to the checkpoint's folder, "optimizer/state.json".
  std::map<std::string, FileSums> files;

  friend bool operator==(const Manifest& a, const Manifest& b) {
    return a.step == b.step && a.files == b.files;
  }
};

// InvalidArgument unless `name` can be a file of a checkpoint: a file name, or
// a folder and a file name, without "..", control characters and backslashes,
// not absolute, and neither the manifest nor kGivenUpName.
absl::Status CheckFileName(absl::string_view name);

// Returns one line of JSON:
//   {"format": "libtorch_fsdp checkpoint", "version": 1, "step": 7,
//    "block_bytes": 1048576, "files": {"model.safetensors": {"bytes": 3,
//    "crc32c": "364b3fb7", "blocks": "364b3fb7"}}, "crc32c": "..."}
// `blocks` has eight digits per block. The last checksum covers the text in
// front of `, "crc32c": `.
std::string FormatManifest(const Manifest& manifest);

// DataLoss, naming `path` and what is wrong: FormatManifest() makes no such
// text. Unimplemented: it is of a later version.
absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view path);

// `folder` is a checkpoint's. NotFound: it was never committed.
absl::StatusOr<Manifest> ReadManifest(FileSystem& files,
                                      const std::string& folder);

// Checks whether a checkpoint's folder is what its manifest says.

struct Problem {
  std::string file;  // relative to the folder
  std::string text;  // "model.safetensors: MiB [5, 7) are damaged"
};

// Returns all problems that can be seen without reading the files.
absl::StatusOr<std::vector<Problem>> CompareSizes(FileSystem& files,
                                                  const std::string& folder,
                                                  const Manifest& manifest);

// Returns all problems. Reads every byte, in O(buffer) memory, and calls
// `progress`, which may be null, now and then.
absl::StatusOr<std::vector<Problem>> VerifyFiles(
    FileSystem& files, const std::string& folder, const Manifest& manifest,
    const std::function<void(int64_t done, int64_t total)>& progress);

// Returns OK if there are no problems, otherwise DataLoss with all of them and
// what to do.
absl::Status ProblemsStatus(absl::string_view folder,
                            const std::vector<Problem>& problems);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_MANIFEST_H_
