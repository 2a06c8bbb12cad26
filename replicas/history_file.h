// Where replicas write down who took part in which steps.
#ifndef REPLICAS_HISTORY_FILE_H_
#define REPLICAS_HISTORY_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
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

// The rosters that a rank goes through, one after the other.

// Used by the rank's own thread. Aborted: this replica is no member any more.
class StepLog {
 public:
  virtual ~StepLog() = default;

  // Waits until this replica takes part: the roster with which the step begins
  // that it comes in, or one whose step is the run's end. All ranks of a
  // replica call it together, and get the same.
  virtual absl::StatusOr<Roster> Enter(int64_t first_step) = 0;
  // The newest roster of this step: `roster`, or what losses have left of it.
  virtual absl::StatusOr<Roster> SkipLosses(const Roster& roster) = 0;
  // This rank has all that it needs to finish the step of `roster`.
  virtual absl::Status VoteFor(const Roster& roster) = 0;
  // The entry after `roster`.
  virtual absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                           absl::Time deadline) = 0;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_HISTORY_FILE_H_
