// Where replicas write down who took part in which steps.
#ifndef REPLICAS_HISTORY_FILE_H_
#define REPLICAS_HISTORY_FILE_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

// Of all lives of a replica; each appends what it has seen.
class HistoryFile {
 public:
  // "replica-2.txt" in `folder`, which is made where there is none.
  // AlreadyExists: the first life of `self`, incarnation 1, finds it there,
  // from another run. Errors: as of the disk.
  static absl::StatusOr<std::unique_ptr<HistoryFile>> Open(
      const std::string& folder, const ReplicaId& self);

  // Appends a line where `roster` says something new.
  absl::Status Add(const Roster& roster);

 private:
  explicit HistoryFile(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  History history_;  // of this life
};

// What all files of a folder say together. Errors: as of the disk, and of
// History.
absl::StatusOr<History> ReadHistory(const std::string& folder);

}  // namespace fsdp::replicas

#endif  // REPLICAS_HISTORY_FILE_H_
