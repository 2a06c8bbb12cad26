#include "replicas/membership/testing/simulated_rank.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp::replicas::testing {
namespace {

uint64_t Mixed(uint64_t a, uint64_t b) {
  a ^= b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2);
  return a * 0xbf58476d1ce4e5b9;
}

std::pair<int, int> PairOf(const ReplicaId& id) {
  return {id.replica, id.incarnation};
}

std::string RankOf(const ReplicaId& id, int rank) {
  return absl::StrCat(id.replica, ".", id.incarnation, "/", rank);
}

}  // namespace

State Trained(const State& state, const Roster& roster) {
  State next = {state.step + 1, Mixed(state.content, state.step)};
  for (const Member& member : roster.members) {
    next.content = Mixed(next.content, member.id.replica);
  }
  return next;
}

LogChecker::Ids LogChecker::IdsOf(const Roster& roster, bool only_old) {
  Ids ids;
  for (const Member& member : roster.members) {
    if (!only_old || !member.is_new) ids.insert(PairOf(member.id));
  }
  return ids;
}

void LogChecker::Complain(const std::string& text) {
  if (finding_.empty()) finding_ = text;
}

void LogChecker::Want(bool condition, const Roster& entry, const char* text) {
  if (!condition) Complain(absl::StrCat(Describe(entry), ": ", text));
}

void LogChecker::Requested(const ReplicaId& id, const State& state) {
  requests_[PairOf(id)] = state;
}

void LogChecker::Voted(const ReplicaId& id, int rank, const Roster& roster) {
  votes_.insert({roster.number, RankOf(id, rank)});
}

bool LogChecker::HasVoted(const ReplicaId& id, int rank, int64_t number) const {
  return votes_.count({number, RankOf(id, rank)}) > 0;
}

void LogChecker::Made(const Roster& entry) {
  Want(entry.number == static_cast<int64_t>(log_.size()), entry,
       "numbers go up by one");
  Want(!has_ended(), entry, "the run had ended");
  const Roster before = log_.empty() ? Roster{} : log_.back();
  const bool same = IdsOf(before, false) == IdsOf(entry, false);
  Want(entry.epoch == before.epoch + (same ? 0 : 1), entry,
       "an epoch is for the same members");
  Want(entry.members.empty() || !IdsOf(entry, true).empty(), entry,
       "somebody has to have the state");
  states_.push_back(states_.empty() ? State{} : states_.back());
  switch (entry.cause) {
    case Cause::kFounded:
      CheckFounded(before, entry);
      break;
    case Cause::kFinished:
      CheckFinished(before, entry);
      break;
    case Cause::kLost:
      CheckLost(before, entry);
      break;
  }
  log_.push_back(entry);
}

void LogChecker::CheckFounded(const Roster& before, const Roster& entry) {
  Want(before.members.empty(), entry, "there were members who had the state");
  const Ids donors = IdsOf(entry, true);
  Want(donors.size() == 1, entry, "a founding has one donor");
  if (donors.empty()) return;
  states_.back() = requests_[*donors.begin()];
  Want(states_.back().step == entry.step, entry, "the donor has another step");
  for (const auto& id : IdsOf(entry, false)) {
    Want(requests_.count(id) > 0, entry, "somebody never asked to join");
    Want(requests_[id].step <= entry.step, entry, "somebody was further");
  }
}

void LogChecker::CheckFinished(const Roster& before, const Roster& entry) {
  Want(entry.step == before.step + 1, entry, "one step was finished");
  Want(!before.members.empty(), entry, "there was nobody to finish a step");
  for (const Member& member : before.members) {
    for (int rank = 0; rank < ranks_; ++rank) {
      Want(HasVoted(member.id, rank, before.number), entry,
           "not all ranks had finished the step");
    }
  }
  for (const Member& member : entry.members) {
    const bool was_member = IdsOf(before, false).count(PairOf(member.id)) > 0;
    Want(member.is_new != was_member, entry, "new are those who join");
    Want(was_member || requests_.count(PairOf(member.id)) > 0, entry,
         "somebody never asked to join");
  }
  states_.back() = Trained(states_.back(), before);
}

void LogChecker::CheckLost(const Roster& before, const Roster& entry) {
  Want(entry.step == before.step, entry, "the same step is computed again");
  const Ids now = IdsOf(entry, false);
  const Ids then = IdsOf(before, false);
  Want(now.size() < then.size() &&
           std::includes(then.begin(), then.end(), now.begin(), now.end()),
       entry, "some were lost, and nobody came");
  for (const Member& member : entry.members) {
    const bool was_old = IdsOf(before, true).count(PairOf(member.id)) > 0;
    Want(member.is_new != was_old, entry,
         "who was new has not the state, who had it has it");
  }
}

void LogChecker::Saw(const Roster& entry) {
  if (entry.number < 0) return;
  Want(entry.number < static_cast<int64_t>(log_.size()) &&
           Encode(log_[static_cast<size_t>(entry.number)]) == Encode(entry),
       entry, "this is not what the log has there");
}

void LogChecker::Begins(const ReplicaId& id, const Roster& entry,
                        const State& state) {
  Saw(entry);
  Want(IsMember(entry, id), entry, "who computes is a member");
  Want(states_[static_cast<size_t>(entry.number)] == state, entry,
       "who computes has another state than the log says");
}

void LogChecker::Applies(const ReplicaId& id, int rank, const Roster& before) {
  const size_t next = static_cast<size_t>(before.number) + 1;
  if (next >= log_.size()) return Complain("applied what was not decided");
  Want(log_[next].cause == Cause::kFinished && IsMember(log_[next], id),
       log_[next], "somebody believes that its step counted");
  Want(HasVoted(id, rank, before.number), log_[next],
       "somebody applies what it never computed");
}

absl::Status FaultyRegisters::Allow(const std::function<void()>& call) {
  switch (hooks_.fate()) {
    case Fate::kDone:
      return absl::OkStatus();
    case Fate::kLost:
      break;
    case Fate::kNoReply:
      call();
      break;
    case Fate::kDelayed:
      hooks_.later(call);
      break;
  }
  return absl::UnavailableError("simulated");
}

absl::StatusOr<std::string> FaultyRegisters::CompareAndSet(
    const std::string& key, const std::string& expected,
    const std::string& value) {
  return Forward([=, base = base(), exchanged = hooks_.exchanged] {
    absl::StatusOr<std::string> now = base->CompareAndSet(key, expected, value);
    exchanged();
    return now;
  });
}

absl::Status FaultyRegisters::Await(const std::string& key, absl::Time) {
  FSDP_ASSIGN_OR_RETURN(const std::optional<std::string> value, Get(key));
  return value.has_value() ? absl::OkStatus()
                           : absl::DeadlineExceededError("simulated");
}

SimulatedRank::SimulatedRank(const MembershipOptions& options,
                             std::unique_ptr<Registers> registers,
                             SimulatedReplica* replica, const State& checkpoint,
                             const RankSurroundings& surroundings)
    : options_(options),
      registers_(std::move(registers)),
      replica_(replica),
      surroundings_(surroundings),
      phase_(options.rank == 0 ? Phase::kRequest : Phase::kFollow),
      state_(checkpoint) {
  auto membership = Membership::Create(options, registers_.get());
  FSDP_CHECK(membership.ok());
  membership_ = *std::move(membership);
}

std::string SimulatedRank::Text() const {
  return absl::StrCat(ToString(options_.self), "/", options_.rank, " in phase ",
                      static_cast<int>(phase_), " at ", Describe(roster_));
}

bool SimulatedRank::Failed(const absl::Status& status) {
  if (status.ok()) return false;
  if (absl::IsUnavailable(status)) return true;
  if (absl::IsAlreadyExists(status) || absl::IsOutOfRange(status)) {
    replica_->is_over = true;
  } else if (absl::IsFailedPrecondition(status)) {
    phase_ = Phase::kEvicted;
    was_evicted_ = true;
    ++replica_->evicted[coming_];
  } else if (!absl::IsDeadlineExceeded(status)) {
    surroundings_.checker->Complain(
        absl::StrCat(Text(), ": ", status.ToString()));
  }
  return true;
}

void SimulatedRank::Act() {
  switch (phase_) {
    case Phase::kRequest:
      surroundings_.checker->Requested(options_.self, state_);
      if (!Failed(membership_->Request(state_.step))) phase_ = Phase::kJoin;
      return;
    case Phase::kJoin:
      return Join();
    case Phase::kFollow:
      return Follow();
    case Phase::kTake:
      return Take();
    case Phase::kCompute:
      return Compute();
    case Phase::kWait:
      return Wait();
    case Phase::kEvicted:
      return Return();
    case Phase::kDone:
      return;
  }
}

void SimulatedRank::Join() {
  const absl::StatusOr<Roster> roster =
      membership_->AwaitMembership(absl::InfinitePast());
  if (Failed(roster.status())) return;
  surroundings_.checker->Saw(*roster);
  replica_->numbers[coming_] = roster->number;
  phase_ = Phase::kFollow;
}

void SimulatedRank::Follow() {
  const auto number = replica_->numbers.find(coming_);
  if (number == replica_->numbers.end()) {
    Failed(membership_->Poll().status());
    return;
  }
  const absl::StatusOr<std::optional<Roster>> roster =
      membership_->Entry(number->second);
  if (Failed(roster.status())) return;
  if (!roster->has_value()) {
    surroundings_.checker->Complain("an entry that was there is not");
    return;
  }
  Enter(**roster);
}

void SimulatedRank::Enter(const Roster& roster) {
  surroundings_.checker->Saw(roster);
  roster_ = roster;
  has_voted_ = false;
  if (membership_->HasEnded(roster)) {
    phase_ = Phase::kDone;
    return;
  }
  work_ = surroundings_.random(4);
  phase_ = Phase::kCompute;
  if (FindMember(roster, options_.self.replica)->is_new) {
    phase_ = Phase::kTake;
  } else {
    surroundings_.checker->Begins(options_.self, roster, state_);
  }
}

bool SimulatedRank::IsAborted() {
  const absl::StatusOr<Roster> newest = membership_->Poll();
  if (newest.ok()) surroundings_.checker->Saw(*newest);
  return membership_->latest().epoch > roster_.epoch;
}

void SimulatedRank::Take() {
  is_whole_ = false;
  SimulatedRank* const donor = surroundings_.peer(Donor(roster_)->id);
  if (donor != nullptr && donor->roster_.number == roster_.number &&
      (donor->phase_ == Phase::kCompute || donor->phase_ == Phase::kWait)) {
    state_ = donor->state_;
    is_whole_ = true;
    surroundings_.checker->Begins(options_.self, roster_, state_);
    phase_ = Phase::kCompute;
  } else if (IsAborted()) {
    phase_ = Phase::kWait;
  }
}

void SimulatedRank::Compute() {
  // It may also get its sums before it hears of another epoch.
  if (surroundings_.random(2) == 0 && IsAborted()) {
    phase_ = Phase::kWait;
    return;
  }
  if (--work_ >= 0) return;
  has_voted_ = true;
  surroundings_.checker->Voted(options_.self, options_.rank, roster_);
  if (!Failed(membership_->VoteFor(roster_)) && phase_ == Phase::kCompute) {
    phase_ = Phase::kWait;
  }
}

void SimulatedRank::Wait() {
  const absl::StatusOr<std::optional<Roster>> next = membership_->Next(roster_);
  if (Failed(next.status())) return;
  if (!next->has_value()) {
    Failed(membership_->AwaitNext(roster_, absl::InfinitePast()).status());
    if (phase_ == Phase::kWait) Failed(membership_->Poll().status());
    return;
  }
  if ((*next)->cause == Cause::kFinished) {
    surroundings_.checker->Applies(options_.self, options_.rank, roster_);
    state_ = Trained(state_, roster_);
    surroundings_.save(state_);
  }
  Enter(**next);
}

void SimulatedRank::Return() {
  // All ranks of a replica do the same.
  if (replica_->evicted[coming_] < options_.ranks_per_replica) {
    Failed(membership_->Poll().status());
    return;
  }
  bool all_have_it = true;
  for (const auto& rank : replica_->ranks) {
    all_have_it &=
        rank->is_whole_ && rank->state_ == replica_->ranks[0]->state_;
  }
  if (!all_have_it) {
    replica_->is_over = true;
    return;
  }
  ++coming_;
  phase_ = options_.rank == 0 ? Phase::kRequest : Phase::kFollow;
}

}  // namespace fsdp::replicas::testing
