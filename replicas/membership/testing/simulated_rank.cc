#include "replicas/membership/testing/simulated_rank.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "replicas/membership/membership.h"
#include "replicas/membership/registers.h"
#include "replicas/membership/roster.h"
#include "replicas/membership/testing/log_checker.h"

namespace fsdp::replicas::testing {

absl::Status FaultyRegisters::Meet(const std::function<void()>& call) {
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

absl::StatusOr<std::optional<std::string>> FaultyRegisters::Get(
    const std::string& key) {
  FSDP_RETURN_IF_ERROR(Meet([] {}));
  return base_->Get(key);
}

absl::Status FaultyRegisters::Set(const std::string& key,
                                  const std::string& value) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Set(key, value).IgnoreError(); }));
  return base_->Set(key, value);
}

absl::StatusOr<std::string> FaultyRegisters::CompareAndSet(
    const std::string& key, const std::string& expected,
    const std::string& value) {
  const auto exchange = [=, base = base_, exchanged = hooks_.exchanged] {
    absl::StatusOr<std::string> now = base->CompareAndSet(key, expected, value);
    exchanged();
    return now;
  };
  FSDP_RETURN_IF_ERROR(Meet([=] { exchange().IgnoreError(); }));
  return exchange();
}

absl::StatusOr<int64_t> FaultyRegisters::Add(const std::string& key,
                                             int64_t addend) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Add(key, addend).IgnoreError(); }));
  return base_->Add(key, addend);
}

absl::Status FaultyRegisters::Remove(const std::string& key) {
  FSDP_RETURN_IF_ERROR(
      Meet([=, base = base_] { base->Remove(key).IgnoreError(); }));
  return base_->Remove(key);
}

absl::StatusOr<bool> FaultyRegisters::HasAll(
    const std::vector<std::string>& keys) {
  FSDP_RETURN_IF_ERROR(Meet([] {}));
  return base_->HasAll(keys);
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
