// How replicas agree on who computes which step: a log of rosters, of which
// each is made once, by whichever rank sees first that it is due.
//
// The log is a ring of kLogEntries registers, and entry n is set by exchanging
// entry n - kLogEntries for it. So of all proposals for one number one is made,
// however late a stopped process wakes up with another, and nothing is ever
// removed that somebody could set a second time. A proposal is made of facts
// about the entry before (all ranks have voted, members have left or are
// silent), which stay true until another entry is made. Consensus is thus the
// registers', whose keeper must outlive the run.
#ifndef REPLICAS_MEMBERSHIP_MEMBERSHIP_H_
#define REPLICAS_MEMBERSHIP_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

inline constexpr int64_t kLogEntries = 64;

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
  // How often waits look for what nobody has rung a bell for.
  absl::Duration poll_interval = absl::Milliseconds(200);

  // The time of all durations here and of the registers' deadlines. A rank that
  // was stopped, whose clock jumped or who could not reach the registers counts
  // silence from then on anew.
  std::function<absl::Time()> now = absl::Now;
};

// One rank's view and part of it. Thread-safe: made for the thread that
// computes, and one that calls Poll() every beat_interval meanwhile and aborts
// collectives of columns once latest().epoch is newer than theirs.
//
// Of each replica one rank calls Request(); all call AwaitMembership(), agree
// on the largest number that one of them was given, and take that entry
// (Entry()). From then on each of them goes through the same entries, one by
// one:
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
//                       one's is taken: the process is to end.
//   DeadlineExceeded    as it says.
class Membership {
 public:
  // `registers` outlives it. InvalidArgument: see the text.
  static absl::StatusOr<std::unique_ptr<Membership>> Create(
      const MembershipOptions& options, Registers* registers);

  // "Here I am, and could begin with `first_step`": this replica becomes a
  // member with the next step that is finished, or with the next founding.
  // Does nothing while it is one. A request that was lost on the way is made
  // again by AwaitMembership() of the same object.
  absl::Status Request(int64_t first_step);

  // The newest roster once it has this replica as a member, or the run has
  // ended (HasEnded()), whether it has it or not.
  absl::StatusOr<Roster> AwaitMembership(absl::Time deadline);

  // This rank has its part of the summed gradients of `roster`, of which it is
  // a member, in hand. The step is finished once all ranks of all members have
  // said so, and entry number + 1 tells it. May be repeated.
  absl::Status VoteFor(const Roster& roster);

  // Entry `number`; nullopt: it has not been made yet. FailedPrecondition: it
  // is older than the log.
  absl::StatusOr<std::optional<Roster>> Entry(int64_t number);
  // The entry after `roster`, which this replica is a member of, once it has
  // been made and if it is still one there. Does what Poll() does meanwhile.
  absl::StatusOr<std::optional<Roster>> Next(const Roster& roster);
  absl::StatusOr<Roster> AwaitNext(const Roster& roster, absl::Time deadline);

  // Lets hear of this rank, follows the log, and makes the next entry if one
  // is due. The newest entry; number -1: there is none yet.
  absl::StatusOr<Roster> Poll();
  // As of the last call that asked the registers; asks nobody.
  Roster latest() const;

  // This replica goes, with all of its ranks; any one of them says so.
  absl::Status Leave();

  bool HasEnded(const Roster& roster) const {
    return options_.steps > 0 && roster.step >= options_.steps;
  }
  const MembershipOptions& options() const { return options_; }

 private:
  // What this rank knows of another one's beats.
  struct Heard {
    std::string beat;
    absl::Time changed;
  };
  using RankKey = std::tuple<int, int, int>;  // replica, incarnation, rank

  Membership(const MembershipOptions& options, Registers* registers);

  const MembershipOptions options_;
  Registers* const registers_;

  mutable absl::Mutex latest_mutex_;
  Roster latest_ ABSL_GUARDED_BY(latest_mutex_);
};

// What Leave() does, by somebody who has seen the replica end, such as its
// launcher.
absl::Status TellGone(Registers& registers, const ReplicaId& id);

}  // namespace fsdp::replicas

#endif  // REPLICAS_MEMBERSHIP_MEMBERSHIP_H_
