// The log of rosters that a rank goes through, of a run that is under way or of
// a recorded one, and the files in which replicas note who took part.
#ifndef REPLICAS_LIVE_LOG_H_
#define REPLICAS_LIVE_LOG_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "replicas/membership/history.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
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
  int64_t epoch_ = -1;  // the last one that this life has written
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

struct LiveLogOptions {
  MembershipOptions membership;
  // The ranks of this replica, which are aborted when it is lost; outlives the
  // log. Null if the replica has one rank.
  comm::Communicator* inside = nullptr;
  // Called by another thread when the members are no longer those of epochs
  // before `epoch`.
  std::function<void(int64_t epoch)> on_epoch;
  // Asked while Enter() waits; may be null.
  std::function<bool()> stop_requested;
  std::string history_folder;  // empty: none
  // How long the keeper may be silent after a step has begun.
  absl::Duration patience = absl::Seconds(30);
};

// Its thread gives signs of life of this rank, finds out who is lost, and takes
// launchers' keys, such as "gone/2/1" for the end of incarnation 1 of replica
// 2, as leaves.
class LiveLog final : public StepLog {
 public:
  static absl::StatusOr<std::unique_ptr<LiveLog>> Start(
      LiveLogOptions options, std::unique_ptr<Registers> registers);
  // Leaves the log, unless the run is over.
  ~LiveLog() override;

  absl::StatusOr<Roster> Enter(int64_t first_step) override;
  absl::StatusOr<Roster> SkipLosses(const Roster& roster) override;
  absl::Status VoteFor(const Roster& roster) override;
  absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                   absl::Time deadline) override;

 private:
  static constexpr int64_t kNotYet = -1;  // stands for the number of an entry

  LiveLog(LiveLogOptions options, std::unique_ptr<Registers> registers)
      : options_(std::move(options)), registers_(std::move(registers)) {}

  // Returns the entry in which this replica takes part, or the run's end, or
  // kNotYet; the same on all ranks of the replica. `mine` is what hinders this
  // rank.
  absl::StatusOr<int64_t> AwaitMembership(absl::Status mine);
  absl::StatusOr<Roster> Entry(int64_t number);
  void Note(const Roster& roster);
  void Watch();
  void WatchOnce();
  void TakeUpEnds(const Roster& roster);

  const LiveLogOptions options_;
  const std::unique_ptr<Registers> registers_;
  std::unique_ptr<Membership> membership_;
  std::unique_ptr<HistoryFile> history_;  // rank 0 of the replica has one
  bool entered_ = false;
  bool over_ = false;
  int64_t epoch_ = -1;  // of the last on_epoch(); used by thread_
  std::atomic<int64_t> entered_with_{kNotYet};  // the entry's number

  absl::Mutex mutex_;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The log of a run that repeats a recorded one. It asks and waits for nobody:
// collectives keep ranks in step. A replica is told that it is lost where it
// was.
class ReplayLog final : public StepLog {
 public:
  // `history` begins with a founding. Whoever was lost before step `steps` is
  // lost again; nobody is later.
  ReplayLog(History history, const ReplicaId& self, int64_t steps)
      : history_(std::move(history)), self_(self), steps_(steps) {}

  // Never returns the run's end: see HasNoStep(). FailedPrecondition: the
  // founder brought the state of another step. InvalidArgument: the history has
  // no step of this life or a later one: it comes after the end, or an earlier
  // one was lost here only.
  absl::StatusOr<Roster> Enter(int64_t first_step) override;
  absl::StatusOr<Roster> SkipLosses(const Roster& roster) override;
  absl::Status VoteFor(const Roster& roster) override;
  absl::StatusOr<Roster> AwaitNext(const Roster& roster,
                                   absl::Time deadline) override;

  // True if this life has ended where it ends in the history, too. Any other
  // error ends the replay, because others may wait for this replica for ever.
  bool ends_as_recorded() const { return ends_as_recorded_; }

 private:
  // Says why this life cannot take part. `end` is the run's.
  absl::Status HasNoStep(const Roster& end);
  absl::Status AsRecorded(const absl::Status& status);

  const History history_;
  const ReplicaId self_;
  const int64_t steps_;
  bool ends_as_recorded_ = false;
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_LIVE_LOG_H_
