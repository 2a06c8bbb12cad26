// How replicas agree on who computes which step: a log of rosters, of which
// each is made once, by whichever rank sees first that it is due.
//
// Of all proposals for one entry the log takes one, however late a stopped
// process comes with another. A proposal is made of facts about the entry
// before: all ranks have voted for it, members of it have left or are silent.
// Those stay true until the entry after it is made, by whomever. Consensus is
// thus the registers', whose keeper must outlive the run.
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
#include "replicas/membership/heartbeats.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/roster_log.h"

namespace fsdp::replicas {

struct MembershipOptions {
  ReplicaId self;
  int rank = 0;               // of this process in its replica
  int ranks_per_replica = 1;  // of every replica
  int replicas = 1;           // a founding waits for so many,
  int min_replicas = 1;       // but only for so many after found_timeout.
  int64_t steps = 0;  // the run ends where a roster has this step; 0: never

  absl::Duration found_timeout = absl::Seconds(60);
  // A replica of which one rank has not been heard of for so long is lost.
  absl::Duration loss_timeout = absl::Seconds(30);
  // A member one of whose ranks has not voted so long after this rank did is
  // lost, unless nobody would be left who holds the state; 0: never.
  absl::Duration step_timeout = absl::ZeroDuration();
  // How often a rank lets hear of itself and listens; at most a quarter of
  // loss_timeout.
  absl::Duration beat_interval = absl::Seconds(1);
  // How often waits look whether something is due that nobody has seen to.
  absl::Duration poll_interval = absl::Milliseconds(200);
  // How many entries the log has; the same for all.
  int64_t log_entries = 64;

  // The time of all durations here and of the registers' deadlines. A rank that
  // was stopped, whose clock jumped or who could not reach the registers counts
  // silence from then on anew.
  std::function<absl::Time()> now = absl::Now;
};

// One rank's view and part of it. Thread-safe: made for the thread that
// computes, and one that calls Poll() every beat_interval meanwhile and aborts
// collectives of columns once latest().epoch is newer than theirs.
//
// Of each replica rank 0 alone calls Request() and AwaitMembership(), and tells
// the others the number of the entry that it was given, or the error; they take
// it by Entry(). (A rank that awaited it by itself might do so for ever: the
// replica may be lost again before it looks.) From then on each of them goes
// through the same entries, one by one:
//
//   compute roster.step, reduce along columns   // may be aborted
//   VoteFor(roster)                             // unless aborted
//   next = AwaitNext(roster, deadline)
//   if (next.cause == kFinished) apply the gradients of `roster`
//   otherwise drop them, compute the same step again
//   new members of `next` take the state from Donor(next)
//
// Errors, beside those of Registers, which change nothing and may be tried
// again (Unavailable):
//   FailedPrecondition  this replica is no member (any more): the vote that it
//                       gave last counts for nothing. It may request again,
//                       with what state it has whole.
//   AlreadyExists       a newer incarnation of this replica has come, or this
//                       one's is taken: the replica's processes are to end.
//   OutOfRange          this rank has slept for more entries than the log has.
//                       Its replica may be a member still, but cannot go on:
//                       its processes are to end.
//   DeadlineExceeded    as it says.
class Membership {
 public:
  // `registers` outlives it. InvalidArgument: see the text.
  static absl::StatusOr<std::unique_ptr<Membership>> Create(
      const MembershipOptions& options, Registers* registers);

  // "Here I am, and could begin with `first_step`": this replica becomes a
  // member with the next step that is finished, or with the next founding.
  // Does nothing while it is one. AwaitMembership() of the same object makes a
  // request again that was lost on the way, also one that was Unavailable.
  absl::Status Request(int64_t first_step);

  // The newest roster once it has this replica as a member, or the run has
  // ended (HasEnded()), whether it has it or not.
  absl::StatusOr<Roster> AwaitMembership(absl::Time deadline);

  // This rank has its part of the summed gradients of `roster`, of which it is
  // a member, in hand. The step is finished once all ranks of all members have
  // said so, and entry number + 1 tells it. May be repeated.
  absl::Status VoteFor(const Roster& roster);

  // Entry `number`; nullopt: it has not been made yet. OutOfRange: it is
  // older than the log.
  absl::StatusOr<std::optional<Roster>> Entry(int64_t number);
  // The entry after `roster`, which this replica is a member of, once it has
  // been made and if it is still one there. Does what Poll() does meanwhile.
  absl::StatusOr<std::optional<Roster>> Next(const Roster& roster);
  absl::StatusOr<Roster> AwaitNext(const Roster& roster, absl::Time deadline);

  // Lets hear of this rank, follows the log, and makes the next entry if one
  // is due. The newest entry; number -1: there is none yet.
  absl::StatusOr<Roster> Poll();
  // What Poll() last returned to any thread, or found for another call; asks
  // nobody.
  Roster latest() const;

  // This incarnation is over, with all of its ranks; any one of them says so.
  absl::Status Leave();

  bool HasEnded(const Roster& roster) const {
    return options_.steps > 0 && roster.step >= options_.steps;
  }
  const MembershipOptions& options() const { return options_; }

 private:
  // A request on its way.
  struct JoinRequest {
    int64_t first_step = 0;
    int64_t number = 0;  // of the notice; 0: none yet
    bool is_written = false;
  };

  Membership(const MembershipOptions& options, Registers* registers);

  // Brings latest_ up to date.
  absl::StatusOr<Roster> Follow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Roster> PollLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Times from before are worth nothing where this rank has not looked since.
  void NoticeGap(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The entry that is due after `roster`; nullopt: none is.
  absl::StatusOr<std::optional<Roster>> Due(const Roster& roster,
                                            absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<Roster> DueFounding(const Roster& roster, absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Members that have not voted long after this rank did.
  absl::StatusOr<std::vector<ReplicaId>> Slow(const Roster& roster,
                                              absl::Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Propose(const Roster& before, const Roster& next)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<std::string> VotesOf(const Roster& roster,
                                   const ReplicaId& id) const;
  absl::StatusOr<bool> HasAllVotes(const Roster& roster) const;
  absl::StatusOr<std::vector<ReplicaId>> NotVoted(const Roster& roster) const;

  // Brings join_ on its way, or again where it was lost.
  absl::Status PostJoin(const Roster& newest)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // AlreadyExists where a newer incarnation has come.
  absl::Status CheckNotReplaced(const Roster& roster) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // One look of AwaitMembership(); nullopt: not yet.
  absl::StatusOr<std::optional<Roster>> FindMembership();

  const MembershipOptions options_;
  Registers* const registers_;
  RosterLog log_;

  // Held while the registers are asked, but not while one is waited for.
  absl::Mutex mutex_;
  NoticeBoard notices_ ABSL_GUARDED_BY(mutex_);
  NoticeBoard::Pending pending_ ABSL_GUARDED_BY(mutex_);
  Heartbeats heartbeats_ ABSL_GUARDED_BY(mutex_);
  absl::Time polled_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t voted_for_ ABSL_GUARDED_BY(mutex_) = -1;  // the entry's number
  absl::Time voted_at_ ABSL_GUARDED_BY(mutex_);
  // Since when there are requests and no members.
  std::optional<absl::Time> founding_since_ ABSL_GUARDED_BY(mutex_);
  std::optional<JoinRequest> join_ ABSL_GUARDED_BY(mutex_);
  bool has_requested_ ABSL_GUARDED_BY(mutex_) = false;  // ever

  // For latest(), which waits for nobody.
  mutable absl::Mutex latest_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  Roster latest_ ABSL_GUARDED_BY(latest_mutex_);
};

// What Leave() does, by somebody who has seen the replica end, such as its
// launcher.
absl::Status TellGone(Registers& registers, const ReplicaId& id);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_MEMBERSHIP_H_
