#include "replicas/membership/testing/log_checker.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "replicas/membership/roster.h"

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
           log_[static_cast<size_t>(entry.number)] == entry,
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

}  // namespace fsdp::replicas::testing
