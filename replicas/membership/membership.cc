#include "replicas/membership/membership.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace fsdp::replicas {
namespace {

absl::string_view WrongOption(const MembershipOptions& options) {
  if (!ParseReplicaId(ToString(options.self)).has_value()) {
    return "a replica or an incarnation out of range";
  }
  if (options.rank < 0 || options.rank >= options.ranks_per_replica) {
    return "0 <= rank < ranks_per_replica";
  }
  if (options.replicas < 1 || options.replicas > kMaxReplicas) {
    return "1 <= replicas <= 1024";
  }
  if (options.beat_interval <= absl::ZeroDuration() ||
      options.beat_interval > options.loss_timeout / 4) {
    return "0 < beat_interval <= loss_timeout / 4";
  }
  if (options.steps < 0 || options.step_timeout < absl::ZeroDuration() ||
      options.found_timeout < absl::ZeroDuration()) {
    return "steps and timeouts that are not negative";
  }
  if (options.log_entries < 2) return "log_entries >= 2";
  return "";
}

std::string VoteKey(int64_t number, const ReplicaId& id, int rank) {
  return absl::StrCat("membership/vote/", number, "/", ToString(id), "/", rank);
}

absl::Status NoMember(const ReplicaId& self, const Roster& roster) {
  return absl::FailedPreconditionError(absl::StrCat(
      "replica ", ToString(self), " is no member of ", Describe(roster),
      roster.members.empty()
          ? ": all who held the training's state are gone. Whoever has one, "
            "from memory or a checkpoint, requests to found anew"
          : ": the others took it for lost, or it left. What it computed last "
            "does not count. It may request to join again"));
}

absl::Status Replaced(const ReplicaId& self, int by) {
  return absl::AlreadyExistsError(absl::StrCat(
      "replica ", ToString(self), " has been replaced by its incarnation ", by,
      ", and is to end"));
}

// Returns whether a wait with a deadline goes on after `status`.
bool MayPass(const absl::Status& status) {
  return status.ok() || absl::IsUnavailable(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Membership>> Membership::Create(
    const MembershipOptions& options, Registers* registers) {
  if (const absl::string_view wrong = WrongOption(options); !wrong.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("options of replica ", ToString(options.self), " rank ",
                     options.rank, ": not ", wrong));
  }
  return absl::WrapUnique(new Membership(options, registers));
}

Membership::Membership(const MembershipOptions& options, Registers* registers)
    : options_(options),
      registers_(registers),
      log_(registers, options.log_entries),
      notices_(registers),
      heartbeats_({options.self, options.rank, options.ranks_per_replica,
                   options.beat_interval, options.loss_timeout},
                  registers) {}

absl::Status Membership::Request(int64_t first_step) {
  const absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(const Roster roster, Follow());
  FSDP_ASSIGN_OR_RETURN(pending_, notices_.ReadAfter(roster.notices_seen));
  FSDP_RETURN_IF_ERROR(CheckNotReplaced(roster));
  if (IsMember(roster, options_.self)) {
    if (has_requested_) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(
        "replica ", ToString(options_.self),
        " is a member already: ", Describe(roster),
        ". Processes that were started anew need a larger incarnation"));
  }
  has_requested_ = true;
  join_ = JoinRequest{first_step, join_.has_value() ? join_->number : 0};
  return PostJoin(roster);
}

absl::Status Membership::PostJoin(const Roster& newest) {
  if (join_->number <= newest.notices_seen) {
    FSDP_ASSIGN_OR_RETURN(join_->number, notices_.Reserve());
    join_->is_written = false;
  }
  // A request is written once: a second one that arrives late might found a run
  // with a state that this replica no longer has.
  if (join_->is_written) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(notices_.Write(
      join_->number, {Notice::Kind::kJoin, options_.self, join_->first_step}));
  join_->is_written = true;
  return absl::OkStatus();
}

absl::Status Membership::CheckNotReplaced(const Roster& roster) const {
  const Member* const member = FindMember(roster, options_.self.replica);
  int newest = member == nullptr ? 0 : member->id.incarnation;
  for (const Notice& notice : pending_.notices) {
    if (notice.id.replica != options_.self.replica) continue;
    newest = std::max(newest, notice.id.incarnation);
  }
  if (newest <= options_.self.incarnation) return absl::OkStatus();
  return Replaced(options_.self, newest);
}

absl::StatusOr<Roster> Membership::AwaitMembership(absl::Time deadline) {
  while (true) {
    const absl::StatusOr<std::optional<Roster>> found = FindMembership();
    if (!MayPass(found.status())) return found.status();
    if (found.ok() && found->has_value()) return **found;
    const absl::Time now = options_.now();
    if (now >= deadline) {
      FSDP_RETURN_IF_ERROR(found.status());
      return absl::DeadlineExceededError(absl::StrCat(
          "replica ", ToString(options_.self),
          " has not become a member in time: ", Describe(latest())));
    }
    absl::Status bell = log_.Await(
        latest().number + 1, std::min(deadline, now + options_.beat_interval));
    if (!MayPass(bell) && !absl::IsDeadlineExceeded(bell)) return bell;
  }
}

absl::StatusOr<std::optional<Roster>> Membership::FindMembership() {
  const absl::MutexLock lock(&mutex_);
  FSDP_ASSIGN_OR_RETURN(Roster roster, PollLocked());
  if (HasEnded(roster) || IsMember(roster, options_.self)) {
    join_.reset();
    return std::optional<Roster>(std::move(roster));
  }
  FSDP_RETURN_IF_ERROR(CheckNotReplaced(roster));
  if (join_.has_value()) FSDP_RETURN_IF_ERROR(PostJoin(roster));
  return std::nullopt;
}

absl::Status Membership::VoteFor(const Roster& roster) {
  if (!IsMember(roster, options_.self)) return NoMember(options_.self, roster);
  const absl::MutexLock lock(&mutex_);
  if (roster.number < voted_for_) return absl::OkStatus();
  FSDP_RETURN_IF_ERROR(registers_->Set(
      VoteKey(roster.number, options_.self, options_.rank), "1"));
  if (voted_for_ != roster.number) {
    if (voted_for_ >= 0) {
      // The entry after that one exists, so that nobody reads the vote.
      registers_->Remove(VoteKey(voted_for_, options_.self, options_.rank))
          .IgnoreError();
    }
    voted_for_ = roster.number;
    voted_at_ = options_.now();
  }
  // The last one to vote makes the entry, so that nobody waits for a poll.
  FSDP_ASSIGN_OR_RETURN(const bool all, HasAllVotes(roster));
  if (!all) return absl::OkStatus();
  FSDP_ASSIGN_OR_RETURN(pending_, notices_.ReadAfter(roster.notices_seen));
  return Propose(roster, AfterStep(roster, pending_.notices, pending_.seen));
}

absl::StatusOr<std::optional<Roster>> Membership::Entry(int64_t number) {
  return log_.Entry(number);
}

absl::StatusOr<std::optional<Roster>> Membership::Next(const Roster& roster) {
  FSDP_ASSIGN_OR_RETURN(std::optional<Roster> next,
                        log_.Entry(roster.number + 1));
  if (!next.has_value() || IsMember(*next, options_.self)) return next;
  const Member* const member = FindMember(*next, options_.self.replica);
  if (member != nullptr && member->id.incarnation > options_.self.incarnation) {
    return Replaced(options_.self, member->id.incarnation);
  }
  return NoMember(options_.self, *next);
}

absl::StatusOr<Roster> Membership::AwaitNext(const Roster& roster,
                                             absl::Time deadline) {
  while (true) {
    const absl::StatusOr<std::optional<Roster>> next = Next(roster);
    if (!MayPass(next.status())) return next.status();
    if (next.ok() && next->has_value()) return **next;
    const absl::Time now = options_.now();
    if (now >= deadline) {
      FSDP_RETURN_IF_ERROR(next.status());
      FSDP_ASSIGN_OR_RETURN(const std::vector<ReplicaId> missing,
                            NotVoted(roster));
      return absl::DeadlineExceededError(absl::StrCat(
          "no entry came in time after ", Describe(roster),
          "; not all ranks have voted of: ",
          absl::StrJoin(missing, ", ", [](std::string* out, const auto& id) {
            absl::StrAppend(out, ToString(id));
          })));
    }
    absl::Status bell = log_.Await(
        roster.number + 1, std::min(deadline, now + options_.beat_interval));
    if (bell.ok()) continue;
    if (!MayPass(bell) && !absl::IsDeadlineExceeded(bell)) return bell;
    absl::Status polled = Poll().status();
    if (!MayPass(polled)) return polled;
  }
}

absl::StatusOr<Roster> Membership::Poll() {
  const absl::MutexLock lock(&mutex_);
  return PollLocked();
}

Roster Membership::latest() const {
  const absl::MutexLock lock(&latest_mutex_);
  return latest_;
}

absl::StatusOr<Roster> Membership::Follow() {
  FSDP_ASSIGN_OR_RETURN(Roster newest, log_.Newest(latest()));
  const absl::MutexLock lock(&latest_mutex_);
  latest_ = newest;
  return newest;
}

absl::StatusOr<Roster> Membership::PollLocked() {
  const absl::Time now = options_.now();
  NoticeGap(now);
  FSDP_RETURN_IF_ERROR(heartbeats_.Beat(now));
  FSDP_ASSIGN_OR_RETURN(Roster roster, Follow());
  if (!HasEnded(roster)) {
    FSDP_ASSIGN_OR_RETURN(pending_, notices_.ReadAfter(roster.notices_seen));
    FSDP_ASSIGN_OR_RETURN(const std::optional<Roster> next, Due(roster, now));
    if (next.has_value()) {
      FSDP_RETURN_IF_ERROR(Propose(roster, *next));
      FSDP_ASSIGN_OR_RETURN(roster, Follow());
    }
  }
  polled_at_ = now;
  return roster;
}

void Membership::NoticeGap(absl::Time now) {
  if (now >= polled_at_ && now - polled_at_ <= options_.loss_timeout / 2) {
    return;
  }
  heartbeats_.Forget();
  voted_at_ = now;
  founding_since_.reset();
}

absl::StatusOr<std::optional<Roster>> Membership::Due(const Roster& roster,
                                                      absl::Time now) {
  if (roster.members.empty()) return DueFounding(roster, now);
  founding_since_.reset();
  if (voted_for_ == roster.number) {
    FSDP_ASSIGN_OR_RETURN(const bool all, HasAllVotes(roster));
    if (all) return AfterStep(roster, pending_.notices, pending_.seen);
  }
  std::vector<ReplicaId> gone = Gone(roster, pending_.notices);
  FSDP_ASSIGN_OR_RETURN(const std::vector<ReplicaId> silent,
                        heartbeats_.Silent(roster, now));
  gone.insert(gone.end(), silent.begin(), silent.end());
  if (gone.empty()) {
    FSDP_ASSIGN_OR_RETURN(gone, Slow(roster, now));
  }
  if (gone.empty()) return std::nullopt;
  return Without(roster, gone);
}

std::optional<Roster> Membership::DueFounding(const Roster& roster,
                                              absl::Time now) {
  const int waiting = static_cast<int>(Waiting(pending_.notices).size());
  if (waiting == 0) {
    founding_since_.reset();
    return std::nullopt;
  }
  if (!founding_since_.has_value()) founding_since_ = now;
  const bool is_late = now - *founding_since_ >= options_.found_timeout;
  if (!is_late && waiting < options_.replicas) return std::nullopt;
  return Found(roster, pending_.notices, pending_.seen);
}

absl::StatusOr<std::vector<ReplicaId>> Membership::Slow(const Roster& roster,
                                                        absl::Time now) {
  std::vector<ReplicaId> slow;
  if (options_.step_timeout == absl::ZeroDuration() ||
      voted_for_ != roster.number || now - voted_at_ < options_.step_timeout) {
    return slow;
  }
  FSDP_ASSIGN_OR_RETURN(slow, NotVoted(roster));
  // A slow replica is better than a run without its state.
  if (!slow.empty() && Without(roster, slow).members.empty()) slow.clear();
  return slow;
}

absl::Status Membership::Propose(const Roster& before, const Roster& next) {
  FSDP_ASSIGN_OR_RETURN(const bool made, log_.Propose(next));
  if (made) notices_.Forget(before.notices_seen, next.notices_seen);
  return absl::OkStatus();
}

std::vector<std::string> Membership::VotesOf(const Roster& roster,
                                             const ReplicaId& id) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < options_.ranks_per_replica; ++rank) {
    keys.push_back(VoteKey(roster.number, id, rank));
  }
  return keys;
}

absl::StatusOr<bool> Membership::HasAllVotes(const Roster& roster) const {
  std::vector<std::string> keys;
  for (const Member& member : roster.members) {
    const std::vector<std::string> votes = VotesOf(roster, member.id);
    keys.insert(keys.end(), votes.begin(), votes.end());
  }
  return registers_->HasAll(keys);
}

absl::StatusOr<std::vector<ReplicaId>> Membership::NotVoted(
    const Roster& roster) const {
  std::vector<ReplicaId> missing;
  for (const Member& member : roster.members) {
    FSDP_ASSIGN_OR_RETURN(const bool all,
                          registers_->HasAll(VotesOf(roster, member.id)));
    if (!all) missing.push_back(member.id);
  }
  return missing;
}

absl::Status TellGone(Registers& registers, const ReplicaId& id) {
  NoticeBoard notices(&registers);
  FSDP_ASSIGN_OR_RETURN(const int64_t number, notices.Reserve());
  return notices.Write(number, {Notice::Kind::kLeave, id, /*first_step=*/0});
}

}  // namespace fsdp::replicas
