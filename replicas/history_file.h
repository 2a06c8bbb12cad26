// Files in which replicas note who took part in which steps.
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

// The file of all lives of a replica; each life appends what it has seen.
class HistoryFile {
 public:
  // Opens "replica-2.txt" in `folder`, which is made if there is none.
  // AlreadyExists: `self` is the first life, incarnation 1, and finds a file of
  // another run. Other errors are those of the disk.
  static absl::StatusOr<std::unique_ptr<HistoryFile>> Open(
      const std::string& folder, const ReplicaId& self);

  // Appends a line if `roster` says something new.
  absl::Status Add(const Roster& roster);

 private:
  explicit HistoryFile(std::string path) : path_(std::move(path)) {}

  const std::string path_;
  History history_;  // of this life
};

// Returns the history that all files of a folder make up. Errors are those of
// the disk and of History.
absl::StatusOr<History> ReadHistory(const std::string& folder);

// The rosters that a rank goes through, one after the other. The rank's own
// thread uses it. Every call may return Aborted: this replica is no member any
// more.
class StepLog {
 public:
  virtual ~StepLog() = default;

  // Waits until this replica takes part. Returns the roster with which its
  // first step begins, or one whose step is the run's end. All ranks of a
  // replica call it together and get the same.
  virtual absl::StatusOr<Roster> Enter(int64_t first_step) = 0;
  // Returns the newest roster of this step: `roster`, or what is left of it
  // after losses.
  virtual absl::StatusOr<Roster> SkipLosses(const Roster& roster) = 0;
  // Says that this rank has all that it needs to finish the step of `roster`.
  virtual absl::Status VoteFor(const Roster& roster) = 0;
  // Returns the entry after `roster`.
  virtual absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                           absl::Time deadline) = 0;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_HISTORY_FILE_H_
