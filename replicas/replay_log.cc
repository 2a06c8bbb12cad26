#include "replicas/replay_log.h"

#include <algorithm>
#include <cstdint>
#include <string>

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
  if (roster.step < steps_) return roster;
  return HasNoStep(roster);
}

// OK would say that the run has come to its end, of which this one knows
// nothing: whoever took part may have ended with an error, in this replay.
absl::Status ReplayLog::HasNoStep(const Roster& end) {
  const std::string what =
      absl::StrCat("the history has no step of replica ", ToString(self_));
  const bool comes_later = std::any_of(
      history_.spans().begin(), history_.spans().end(), [this](const Span& s) {
        return std::any_of(s.replicas.begin(), s.replicas.end(),
                           [this](const ReplicaId& id) {
                             return id.replica == self_.replica &&
                                    id.incarnation > self_.incarnation;
                           });
      });
  if (comes_later) {
    return AsRecorded(
        absl::AbortedError(absl::StrCat(what, ", but of its later lives")));
  }
  const Member* const last = FindMember(end, self_.replica);
  if (last == nullptr || last->id == self_) {
    return AsRecorded(absl::InvalidArgumentError(
        absl::StrCat(what, " before step ", steps_, ": it has nothing to do")));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": replica ", ToString(last->id),
      " took part to the end, but has ended earlier now. What it ended with "
      "is the error; this replay cannot go on: start it again"));
}

absl::StatusOr<Roster> ReplayLog::SkipLosses(const Roster& roster) {
  Roster newest = roster;
  for (;;) {
    Roster next = EntryAfter(history_, newest);
    if (next.cause != Cause::kLost) return newest;
    newest = next;
    if (!IsMember(newest, self_)) {
      return AsRecorded(absl::AbortedError(
          absl::StrCat("replica ", ToString(self_), " was lost in step ",
                       roster.step, ", as the history says")));
    }
  }
}

absl::Status ReplayLog::VoteFor(const Roster& /*roster*/) {
  return absl::OkStatus();
}

absl::StatusOr<Roster> ReplayLog::AwaitNext(const Roster& roster,
                                            absl::Time /*deadline*/) {
  Roster next = EntryAfter(history_, roster);
  if (next.step >= steps_ || IsMember(next, self_)) return next;
  return AsRecorded(absl::AbortedError(
      absl::StrCat("replica ", ToString(self_), " was lost after step ",
                   roster.step, ", as the history says")));
}

absl::Status ReplayLog::AsRecorded(const absl::Status& status) {
  ends_as_recorded_ = true;
  return status;
}

}  // namespace fsdp::replicas
