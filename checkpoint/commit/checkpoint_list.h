// Which checkpoints a run's folder has. Changes nothing, and needs no claim.
#ifndef CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
#define CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/files/file_system.h"

namespace fsdp::checkpoint {

struct Committed {
  int64_t step = 0;
  std::string path;  // of its folder
};

// Those that have a manifest, by rising step, however sound it and the other
// files are. One that was just being replaced when a run died is among them.
absl::StatusOr<std::vector<Committed>> ListCheckpoints(FileSystem& files,
                                                       const std::string& root);

// The name in `latest`; empty where there is no such file.
absl::StatusOr<std::string> NamedLatest(FileSystem& files,
                                        const std::string& root);

// What `latest` names if it is one of those, otherwise the newest; none if
// there are none. Higher steps than `latest` are of a line of training that was
// given up, because an older checkpoint was loaded. Where checkpoints are
// committed by manifests: the newest that is not marked as given up.
absl::StatusOr<std::optional<Committed>> LatestCheckpoint(
    FileSystem& files, const std::string& root);

// Whether checkpoints are committed by manifests, by the names in a run's
// folder.
bool IsByManifest(const std::vector<std::string>& names);

// Of a folder where they are: paths of those at whose manifests a run has died,
// which LatestCheckpoint() passes over.
absl::StatusOr<std::vector<std::string>> TornCheckpoints(
    FileSystem& files, const std::string& root);

struct Retention {
  int64_t keep_last = 0;   // the newest ones; 0: all
  int64_t keep_every = 0;  // and steps that are multiples of it; 0: none
  std::set<int64_t> keep;  // and these, as the one that was loaded and verified
  std::set<int64_t> ignore = {};  // neither counted nor removed
};

// Of `steps`, which rise, those that need not be kept; never the newest, nor
// `latest`.
std::vector<int64_t> StepsToDelete(const std::vector<int64_t>& steps,
                                   std::optional<int64_t> latest,
                                   const Retention& retention);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_COMMIT_CHECKPOINT_LIST_H_
