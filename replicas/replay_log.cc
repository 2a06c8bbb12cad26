#include "replicas/replay_log.h"

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "replicas/membership/history.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

absl::StatusOr<Roster> ReplayLog::Enter(int64_t first_step) {
  Roster roster = FirstEntry(history_);
  const Span& founding = history_.spans().front();
  if (founding.founder == self_ && founding.from_step != first_step) {
    return absl::FailedPreconditionError(
        absl::StrCat("the history begins with step ", founding.from_step,
                     ", but this run with step ", first_step,
                     ": begin with the checkpoint with which that one began"));
  }
  while (roster.step < steps_ &&
         (roster.cause == Cause::kLost || !IsMember(roster, self_))) {
    roster = EntryAfter(history_, roster);
  }
  const bool comes_later = std::any_of(
      history_.spans().begin(), history_.spans().end(), [this](const Span& s) {
        return std::any_of(s.replicas.begin(), s.replicas.end(),
                           [this](const ReplicaId& id) {
                             return id.replica == self_.replica &&
                                    id.incarnation > self_.incarnation;
                           });
      });
  if (roster.step < steps_ || !comes_later) return roster;
  return absl::AbortedError(absl::StrCat("the history has no step of replica ",
                                         ToString(self_),
                                         ", but of its later lives"));
}

absl::StatusOr<Roster> ReplayLog::SkipLosses(const Roster& roster) {
  Roster newest = roster;
  for (;;) {
    Roster next = EntryAfter(history_, newest);
    if (next.cause != Cause::kLost) return newest;
    newest = next;
    if (!IsMember(newest, self_)) {
      return absl::AbortedError(absl::StrCat("replica ", ToString(self_),
                                             " was lost in step ", roster.step,
                                             ", as the history says"));
    }
  }
}

absl::Status ReplayLog::VoteFor(const Roster& /*roster*/) {
  return absl::OkStatus();
}

absl::StatusOr<Roster> ReplayLog::AwaitNext(const Roster& roster,
                                            absl::Time /*deadline*/) {
  const Roster next = EntryAfter(history_, roster);
  if (next.step >= steps_ || IsMember(next, self_)) return next;
  return absl::AbortedError(absl::StrCat("replica ", ToString(self_),
                                         " was lost after step ", roster.step,
                                         ", as the history says"));
}

}  // namespace fsdp::replicas
