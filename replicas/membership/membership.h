// How replicas agree on who computes which step: they follow a log of rosters.
// Each entry is made once, by the rank that first sees that it is due.
//
// The log takes one of all proposals for an entry, however late a stopped
// process comes with another. A proposal rests on facts about the entry before
// it: all ranks have voted for it, or members of it have left or are silent.
// These facts stay true until the next entry is made, whoever makes it. So
// consensus is the registers' task, and their keeper must outlive the run.
#ifndef REPLICAS_MEMBERSHIP_MEMBERSHIP_H_
#define REPLICAS_MEMBERSHIP_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/roster_log.h"

namespace fsdp::replicas {

struct MembershipOptions {
  ReplicaId self;
  int rank = 0;               // of this process in its replica
  int ranks_per_replica = 1;  // of every replica
  int replicas = 1;   // a founding waits for so many until found_timeout
  int64_t steps = 0;  // the run ends with a roster of this step; 0: never

  absl::Duration found_timeout = absl::Seconds(60);
  // A replica is lost when one of its ranks was not heard for so long.
  absl::Duration loss_timeout = absl::Seconds(30);
  // A member is lost if one of its ranks has not voted so long after this rank,
  // unless nobody would be left who has the state; 0: never.
  absl::Duration step_timeout = absl::ZeroDuration();
  // How often a rank gives a sign of life and listens, and a wait looks whether
  // something is due; at most a quarter of loss_timeout.
  absl::Duration beat_interval = absl::Seconds(1);
  // The number of entries that the log keeps; the same for all.
  int64_t log_entries = 64;

  // The clock of all durations here and of the registers' deadlines. A rank
  // that was stopped, whose clock jumped or that could not reach the registers
  // counts silence anew.
  std::function<absl::Time()> now = absl::Now;
};

// One rank's part and view of the membership. Thread-safe: one thread computes,
// and another calls Poll() every beat_interval and aborts collectives of
// columns once latest().epoch is newer than theirs.
//
// In each replica rank 0 alone calls Request() and AwaitMembership(), and tells
// the others the entry's number, or the error; they take it by Entry(). (A rank
// that waited by itself might do so for ever: the replica may be lost again
// before it looks.) Then every rank goes through the same entries, one by one:
//
//   compute roster.step, reduce along columns   // may be aborted
//   VoteFor(roster)                             // unless aborted
//   next = AwaitNext(roster, deadline)
//   if (next.cause == kFinished) apply the gradients of `roster`
//   otherwise drop them, compute the same step again
//   new members of `next` take the state from Donor(next)
//
// Errors of Registers change nothing; after Unavailable a call may be repeated.
// The other errors are:
//   FailedPrecondition  This replica is no member: its last vote counts for
//                       nothing. It may request again, with a state that it has
//                       whole.
//   AlreadyExists       A newer incarnation of this replica has come, or this
//                       one is taken: the replica's processes must end.
//   OutOfRange          This rank has slept for more entries than the log
//                       keeps. Its replica may still be a member but cannot go
//                       on: its processes must end.
//   DeadlineExceeded    See the function.
class Membership {
 public:
  // `registers` outlives it. InvalidArgument says which option is wrong.
  static absl::StatusOr<std::unique_ptr<Membership>> Create(
      const MembershipOptions& options, Registers* registers);

  // Asks that this replica, which could begin with `first_step`, become a
  // member with the next finished step or the next founding. Does nothing while
  // it is one. AwaitMembership() of the same object repeats a request that was
  // lost or Unavailable.
  absl::Status Request(int64_t first_step);

  // Returns the newest roster once this replica is a member of it, or the run
  // has ended (HasEnded()), with or without this replica.
  absl::StatusOr<Roster> AwaitMembership(absl::Time deadline);

  // Says that this rank has its part of the summed gradients of `roster`, of
  // which it is a member. The step is finished once all ranks of all members
  // have said so, which entry number + 1 tells. May be repeated.
  absl::Status VoteFor(const Roster& roster);

  // Returns entry `number`, or nullopt if it is not made yet. OutOfRange: it is
  // older than the log.
  absl::StatusOr<std::optional<Roster>> Entry(int64_t number);
  // Return the entry after `roster`, once it is made; this replica has to be a
  // member of both. AwaitNext() also does what Poll() does.
  absl::StatusOr<std::optional<Roster>> Next(const Roster& roster);
  absl::StatusOr<Roster> AwaitNext(const Roster& roster, absl::Time deadline);

  // Gives a sign of life, follows the log, and makes the next entry if it is
  // due. Returns the newest entry, with number -1 if there is none.
  absl::StatusOr<Roster> Poll();
  // Returns what any thread's last call has found, without asking the
  // registers.
  Roster latest() const;

  bool HasEnded(const Roster& roster) const {
    return options_.steps > 0 && roster.step >= options_.steps;
  }

 private:
  // A request that is under way.
  struct JoinRequest {
    int64_t first_step = 0;
    int64_t number = 0;  // of the notice; 0: none yet
    bool is_written = false;
  };

  Membership(const MembershipOptions& options, Registers* registers);

  // Brings latest_ up to date.
  absl::StatusOr<Roster> Follow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Roster> PollLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Restarts all counting of time if this rank has not looked for long.
  void NoticeGap(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Returns the entry that is due after `roster`, or nullopt.
  absl::StatusOr<std::optional<Roster>> Due(const Roster& roster,
                                            absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Roster> DueFounding(const Roster& roster, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns members that have not voted long after this rank has.
  absl::StatusOr<std::vector<ReplicaId>> Slow(const Roster& roster,
                                              absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Propose(const Roster& before, const Roster& next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<std::string> VotesOf(const Roster& roster,
                                   const ReplicaId& id) const;
  absl::StatusOr<bool> HasAllVotes(const Roster& roster) const;
  absl::StatusOr<std::vector<ReplicaId>> NotVoted(const Roster& roster) const;

  // Writes join_, or writes it again if it was lost.
  absl::Status PostJoin(const Roster& newest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // AlreadyExists: a newer incarnation has come.
  absl::Status CheckNotReplaced(const Roster& roster) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Looks once for AwaitMembership(); nullopt: not yet.
  absl::StatusOr<std::optional<Roster>> FindMembership();

  const MembershipOptions options_;
  Registers* const registers_;
  RosterLog log_;

  // Held while the registers are asked, but not while a call waits for one.
  absl::Mutex mutex_;
  NoticeBoard notices_ ABSL_GUARDED_BY(mutex_);
  NoticeBoard::Pending pending_ ABSL_GUARDED_BY(mutex_);
  Heartbeats heartbeats_ ABSL_GUARDED_BY(mutex_);
  absl::Time polled_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t voted_for_ ABSL_GUARDED_BY(mutex_) = -1;  // the entry's number
  absl::Time voted_at_ ABSL_GUARDED_BY(mutex_);
  // The time since which there are requests and no members.
  std::optional<absl::Time> founding_since_ ABSL_GUARDED_BY(mutex_);
  std::optional<JoinRequest> join_ ABSL_GUARDED_BY(mutex_);
  bool has_requested_ ABSL_GUARDED_BY(mutex_) = false;  // ever

  // latest() needs only this mutex, so that it waits for nobody.
  mutable absl::Mutex latest_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  Roster latest_ ABSL_GUARDED_BY(latest_mutex_);
};

// Says that incarnation `id` with all of its ranks is over. Any of its ranks
// may say so, and whoever has seen it end, such as its launcher.
absl::Status TellGone(Registers& registers, const ReplicaId& id);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_MEMBERSHIP_H_
