#include "fsdp/schedule/schedule.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;
constexpr int kNone = -1;

}  // namespace

const char* Name(EventKind kind) {
  switch (kind) {
    case EventKind::kPreForward:
      return "PreForward";
    case EventKind::kPostForward:
      return "PostForward";
    case EventKind::kPreBackward:
      return "PreBackward";
    case EventKind::kPostBackward:
      return "PostBackward";
    case EventKind::kEndOfBackward:
      return "EndOfBackward";
    case EventKind::kReset:
      return "Reset";
    case EventKind::kUnshard:
      return "Unshard";
    case EventKind::kWaitUnshard:
      return "WaitUnshard";
    case EventKind::kReshard:
      return "Reshard";
    case EventKind::kRelease:
      return "Release";
    case EventKind::kSetReduction:
      return "SetReduction";
  }
  return "?";
}

const char* Name(ActionKind kind) {
  switch (kind) {
    case ActionKind::kLoad:
      return "Load";
    case ActionKind::kGather:
      return "Gather";
    case ActionKind::kGatherCopy:
      return "GatherCopy";
    case ActionKind::kWaitGather:
      return "WaitGather";
    case ActionKind::kFree:
      return "Free";
    case ActionKind::kShrink:
      return "Shrink";
    case ActionKind::kDropPart:
      return "DropPart";
    case ActionKind::kAccumulate:
      return "Accumulate";
    case ActionKind::kFillReduceBuffer:
      return "FillReduceBuffer";
    case ActionKind::kReduce:
      return "Reduce";
    case ActionKind::kReplicate:
      return "Replicate";
    case ActionKind::kKeepSums:
      return "KeepSums";
    case ActionKind::kReplicateSums:
      return "ReplicateSums";
    case ActionKind::kWaitReduce:
      return "WaitReduce";
    case ActionKind::kStep:
      return "Step";
    case ActionKind::kOpenShards:
      return "OpenShards";
    case ActionKind::kCloseShards:
      return "CloseShards";
  }
  return "?";
}

std::string ToString(const Event& event) {
  if (event.kind == EventKind::kEndOfBackward ||
      event.kind == EventKind::kReset || event.kind == EventKind::kRelease) {
    return Name(event.kind);
  }
  return absl::StrCat(Name(event.kind), "(", event.unit, ")");
}

std::string ToString(const Action& action) {
  return absl::StrCat(Name(action.kind), "(", action.unit, ")");
}

Schedule::Schedule(std::vector<ScheduledUnit> units, ScheduleOptions options)
    : units_(std::move(units)),
      options_(options),
      states_(units_.size()),
      shares_memory_(std::any_of(
          units_.begin(), units_.end(),
          [](const ScheduledUnit& unit) { return unit.shares_memory; })),
      rests_elsewhere_(std::any_of(
          units_.begin(), units_.end(),
          [](const ScheduledUnit& unit) { return unit.rests_elsewhere; })) {
  FSDP_CHECK(!units_.empty());
  FSDP_CHECK(options_.max_reduce_buffers >= 1);
  FSDP_CHECK(options_.load_distance >= 0);
  for (size_t i = 0; i < units_.size(); ++i) {
    FSDP_CHECK(units_[i].parent < static_cast<int>(i));
    FSDP_CHECK((units_[i].parent == kNone) == (i == kRoot));
  }
}

absl::StatusOr<Actions> Schedule::Next(const Event& event) {
  FSDP_CHECK(event.unit >= 0 && event.unit < static_cast<int>(units_.size()));
  FSDP_RETURN_IF_ERROR(Check(event));
  Actions actions;
  switch (event.kind) {
    case EventKind::kPreForward:
      PreForward(event, actions);
      break;
    case EventKind::kPostForward:
      PostForward(event, actions);
      break;
    case EventKind::kPreBackward:
      PreBackward(event.unit, actions);
      break;
    case EventKind::kPostBackward:
      PostBackward(event, actions);
      break;
    case EventKind::kEndOfBackward:
      EndOfBackward(event, actions);
      break;
    case EventKind::kReset:
      Reset(actions);
      break;
    case EventKind::kUnshard:
      GatherForUser(event.unit, actions);
      if (guess_ == event.unit) guess_ = kNone;
      states_[event.unit].requested = true;
      break;
    case EventKind::kWaitUnshard: {
      const bool requested = states_[event.unit].requested;
      GatherForUser(event.unit, actions);
      EnsureGathered(event.unit, actions);
      states_[event.unit].requested = requested;
      break;
    }
    case EventKind::kReshard:
      Free(event.unit, actions);
      break;
    case EventKind::kRelease:
      FreeUnless([](const State&) { return false; }, actions);
      DropParts(actions);
      break;
    case EventKind::kSetReduction:
      states_[event.unit].synchronizes = event.synchronizes;
      states_[event.unit].all_reduces = event.all_reduces;
      break;
  }
  return actions;
}

absl::Status Schedule::Check(const Event& event) const {
  const State& state = states_[event.unit];
  switch (event.kind) {
    case EventKind::kPreForward:
      return CheckPreForward(event);
    case EventKind::kPostForward:
      return CheckPostForward(event);
    case EventKind::kPreBackward:
    case EventKind::kPostBackward:
      return CheckBackward(event);
    case EventKind::kReshard:
      if (!state.running()) return absl::OkStatus();
      return absl::FailedPreconditionError(
          absl::StrCat("unit ", units_[event.unit].name,
                       " cannot be resharded while it computes"));
    case EventKind::kRelease:
      if (!in_forward() && !in_backward_) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(
          "the parameters of ", units_[kRoot].name,
          " cannot be taken as a whole inside its forward or backward"));
    case EventKind::kSetReduction:
      if (!in_forward() && !in_backward_) return absl::OkStatus();
      return absl::FailedPreconditionError(absl::StrCat(
          "how gradients of unit ", units_[event.unit].name,
          " are reduced cannot change inside a forward or backward of the "
          "model"));
    default:
      return absl::OkStatus();
  }
}

absl::Status Schedule::CheckPreForward(const Event& event) const {
  if (event.recomputes) return CheckBackward(event);
  const bool inner_first = event.unit != kRoot && !in_forward();
  if (inner_first && event.records_graph) {
    return absl::FailedPreconditionError(absl::StrCat(
        "forward with grad of unit ", units_[event.unit].name,
        " outside a forward of its root ", units_[kRoot].name,
        ": the root would not know that a backward is to come. Call the "
        "root's forward, shard this module on its own, or run it under "
        "torch::NoGradGuard"));
  }
  return absl::OkStatus();
}

absl::Status Schedule::CheckPostForward(const Event& event) const {
  if (in_forward() && forward_stack_.back() == event.unit) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the forward of unit ", units_[event.unit].name,
      " ends, but its iteration was given up after an error inside it: let "
      "exceptions reach the caller of the root's forward"));
}

absl::Status Schedule::CheckBackward(const Event& event) const {
  const bool post = event.kind == EventKind::kPostBackward;
  const std::string& name = units_[event.unit].name;
  if (states_[event.unit].stepped && (!post || event.reduces)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a second backward through unit ", name,
        ", whose parameters were stepped in the first: with the optimizer in "
        "backward every forward has one backward"));
  }
  if (options_.step_in_backward && in_forward() && post && event.reduces &&
      event.synchronizes) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a backward inside a forward has gradients of unit ", name,
        ", and the optimizer in backward would step what the forward still "
        "computes with: run that backward after the forward, or the optimizer "
        "after backward"));
  }
  return absl::OkStatus();
}

void Schedule::PreForward(const Event& event, Actions& actions) {
  const int unit = event.unit;
  State& state = states_[unit];
  // The order of the real forward stays, and backward has already prefetched
  // what comes next.
  if (event.recomputes) {
    EnterBackward();
    EnsureGathered(unit, actions);
    forward_stack_.push_back(unit);
    ++state.forwards;
    return;
  }
  if (!in_forward()) BeginIteration(actions);
  forward_order_.push_back(unit);
  forward_stack_.push_back(unit);
  ++state.forwards;
  state.stepped = false;
  FreeWrongGuess(unit, actions);
  EnsureGathered(unit, actions);
  const int next = PredictForward(unit);
  if (options_.forward_prefetch) Prefetch(next, unit, actions);
  LoadAhead(/*forward=*/true, actions);
}

// Shards may have been written since a unit was kept after its forward, by the
// optimizer or by the user: nothing gathered survives into a new iteration but
// what the user has asked for, and what is kept between backwards that
// accumulate, where no optimizer steps.
void Schedule::BeginIteration(Actions& actions) {
  FreeUnless(
      [](const State& state) {
        return (state.requested && state.is_copy) || state.kept;
      },
      actions);
  DropParts(actions);
  if (shares_memory_) PassFence(ActionKind::kOpenShards, actions);
  for (State& state : states_) state.backwards_to_come = 0;
  StopLoading();
  forward_order_.clear();
  post_forward_order_.clear();
  forward_cursor_ = 0;
}

void Schedule::PostForward(const Event& event, Actions& actions) {
  forward_stack_.pop_back();
  --states_[event.unit].forwards;
  if (event.recomputes) {
    // What is recomputed is needed again at once, by its backward.
    if (!event.expects_backward && !states_[event.unit].running()) {
      Free(event.unit, actions);
    }
    return;
  }
  // Without grad it may still be recomputed, and have a backward then.
  ++states_[event.unit].backwards_to_come;
  if (event.expects_backward) post_forward_order_.push_back(event.unit);
  LeaveForward(event.unit, event.expects_backward, actions);
  if (!in_forward()) EndOutermostForward(actions);
}

// Shards may be written from now on: whether a backward is to come nobody
// knows. What is kept for it is not read before, but for what the user has
// asked for inside the forward.
void Schedule::EndOutermostForward(Actions& actions) {
  FreeWrongGuess(kNone, actions);
  previous_forward_order_ = forward_order_;
  FreeUnless(
      [](const State& state) {
        return !state.requested || state.is_copy || state.running();
      },
      actions);
  if (shares_memory_) PassFence(ActionKind::kCloseShards, actions);
}

void Schedule::LeaveForward(int unit, bool expects_backward, Actions& actions) {
  State& state = states_[unit];
  const bool keep = expects_backward && !units_[unit].reshard_after_forward;
  if (keep || state.running()) return;
  if (!expects_backward || !units_[unit].keeps_part || state.has_part) {
    Free(unit, actions);
    return;
  }
  Free(unit, actions, ActionKind::kShrink);
  state.has_part = true;
  ++num_parts_;
}

void Schedule::EnterBackward() {
  if (in_backward_) return;
  in_backward_ = true;
  backward_cursor_ = post_forward_order_.size();
  StopLoading();
}

void Schedule::PreBackward(int unit, Actions& actions) {
  EnterBackward();
  ++states_[unit].backwards;
  FreeWrongGuess(unit, actions);
  EnsureGathered(unit, actions);
  const int next = PredictBackward(unit);
  if (options_.backward_prefetch) Prefetch(next, unit, actions);
  LoadAhead(/*forward=*/false, actions);
}

void Schedule::PostBackward(const Event& event, Actions& actions) {
  const int unit = event.unit;
  State& state = states_[unit];
  // A unit whose output carries no gradient gets here without PreBackward.
  EnterBackward();
  state.backwards = std::max(0, state.backwards - 1);
  // An earlier reduction of this unit that has to make room is not its last.
  state.backwards_to_come = std::max(1, state.backwards_to_come);
  const bool reduces =
      event.reduces && event.synchronizes && state.synchronizes;
  if (reduces) {
    MakeRoomForReduction(actions);
    actions.push_back({ActionKind::kFillReduceBuffer, unit});
    state.has_whole_gradients = false;
  } else if (event.reduces) {
    actions.push_back({ActionKind::kAccumulate, unit});
    state.has_whole_gradients = true;
  }
  // In common memory there is nothing to gather again, and others may write.
  if (!event.synchronizes && units_[unit].keep_until_sync &&
      !units_[unit].shares_memory) {
    state.kept = state.gather == Gather::kGathered;
  } else if (!state.running()) {
    Free(unit, actions);
  }
  if (reduces) {
    StartReduction(unit, actions);
    if (!IsUnsharded(unit)) state.is_read = false;
  }
  --state.backwards_to_come;
}

// The all-reduce of the reduction before starts here at the latest: its
// reduce-scatter had this unit's backward to finish.
void Schedule::MakeRoomForReduction(Actions& actions) {
  if (!reductions_.empty()) Replicate(reductions_.back(), actions);
  if (num_reductions_in_flight() >= options_.max_reduce_buffers) {
    FinishReduction(actions);
  }
}

void Schedule::StartReduction(int unit, Actions& actions) {
  actions.push_back({ActionKind::kReduce, unit});
  const bool keeps_sums = units_[unit].replicated && !states_[unit].all_reduces;
  reductions_.push_back(
      {unit, !units_[unit].replicated || keeps_sums, keeps_sums});
  if (!units_[unit].sharded) Replicate(reductions_.back(), actions);
}

void Schedule::Replicate(Reduction& reduction, Actions& actions) {
  if (reduction.replicating) return;
  actions.push_back({ActionKind::kReplicate, reduction.unit});
  reduction.replicating = true;
  states_[reduction.unit].has_sums = false;
}

// Sums of earlier backwards whose unit this one has not reached.
void Schedule::ReplicateSums(Actions& actions) {
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    State& state = states_[i];
    if (!state.has_sums || !state.synchronizes || !state.all_reduces) continue;
    MakeRoomForReduction(actions);
    actions.push_back({ActionKind::kReplicateSums, i});
    state.has_sums = false;
    reductions_.push_back({i, /*replicating=*/true, /*keeps_sums=*/false});
  }
  while (!reductions_.empty()) FinishReduction(actions);
}

void Schedule::FinishReduction(Actions& actions) {
  const Reduction reduction = reductions_.front();
  reductions_.pop_front();
  if (reduction.keeps_sums) {
    actions.push_back({ActionKind::kKeepSums, reduction.unit});
    states_[reduction.unit].has_sums = true;
    return;
  }
  actions.push_back({ActionKind::kWaitReduce, reduction.unit});
  if (!options_.step_in_backward) return;
  State& state = states_[reduction.unit];
  state.step_due = true;
  const bool in_flight = std::any_of(
      reductions_.begin(), reductions_.end(),
      [&](const Reduction& other) { return other.unit == reduction.unit; });
  if (in_flight || state.backwards_to_come > 0 || state.is_read) return;
  Step(reduction.unit, actions);
}

// What the user has asked for meanwhile may still be reading the shards.
void Schedule::Step(int unit, Actions& actions) {
  State& state = states_[unit];
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
    state.gather = Gather::kGathered;
  }
  actions.push_back({ActionKind::kStep, unit});
  state.step_due = false;
  state.stepped = true;
}

// Units that were gathered but never reached, for example because their output
// was not used in the loss, are freed here. A backward inside a forward leaves
// the units of that forward alone. Gradients kept whole by earlier backwards
// are reduced although this one has not reached their unit, but not where they
// would be stepped inside a forward.
void Schedule::EndOfBackward(const Event& event, Actions& actions) {
  EnterBackward();
  const bool reduces =
      event.synchronizes && !(options_.step_in_backward && in_forward());
  for (State& state : states_) {
    state.backwards = 0;
    state.requested = false;
    state.kept = state.kept && !event.synchronizes;
  }
  FreeUnless([](const State& state) { return state.running() || state.kept; },
             actions);
  DropParts(actions);
  for (int i = 0; reduces && i < static_cast<int>(units_.size()); ++i) {
    if (!states_[i].has_whole_gradients || !states_[i].synchronizes) continue;
    MakeRoomForReduction(actions);
    actions.push_back({ActionKind::kFillReduceBuffer, i});
    states_[i].has_whole_gradients = false;
    StartReduction(i, actions);
  }
  if (!reductions_.empty()) Replicate(reductions_.back(), actions);
  while (!reductions_.empty()) FinishReduction(actions);
  if (reduces) ReplicateSums(actions);
  in_backward_ = false;
  const bool is_read =
      std::any_of(states_.begin(), states_.end(),
                  [](const State& state) { return state.is_read; });
  if (is_read && !in_forward()) PassFence(ActionKind::kCloseShards, actions);
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    if (states_[i].step_due) Step(i, actions);
  }
}

void Schedule::Reset(Actions& actions) {
  FreeUnless([](const State&) { return false; }, actions);
  DropParts(actions);
  reductions_.clear();
  forward_stack_.clear();
  for (State& state : states_) {
    const State before = state;
    state = State();
    state.has_whole_gradients = before.has_whole_gradients;
    state.has_sums = before.has_sums;
    state.synchronizes = before.synchronizes;
    state.all_reduces = before.all_reduces;
    // A graph of before the step stays of no use.
    state.stepped = before.stepped;
  }
  in_backward_ = false;
  forward_order_.clear();
  post_forward_order_.clear();
}

void Schedule::StartGather(int unit, Actions& actions, ActionKind how) {
  State& state = states_[unit];
  actions.push_back({how, unit});
  state.gather = Gather::kInFlight;
  state.is_copy = how == ActionKind::kGatherCopy;
  state.is_read |= units_[unit].shares_memory && !state.is_copy;
  state.loading = false;
  unsharded_.insert(
      std::lower_bound(unsharded_.begin(), unsharded_.end(), unit), unit);
}

// Inside forward and backward shards stay as they are, and a request lasts no
// longer. Outside, what is there for a backward to come may be older than the
// shards, or in the memory of others.
void Schedule::GatherForUser(int unit, Actions& actions) {
  if (in_forward() || in_backward_) {
    if (!IsUnsharded(unit)) StartGather(unit, actions);
    return;
  }
  if (IsHeldForUser(unit)) return;
  Free(unit, actions);
  StartGather(unit, actions, ActionKind::kGatherCopy);
}

// Who has passed it knows that all ranks have.
void Schedule::PassFence(ActionKind fence, Actions& actions) {
  actions.push_back({fence, kRoot});
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    State& state = states_[i];
    state.is_read = units_[i].shares_memory && IsUnsharded(i) && !state.is_copy;
  }
}

void Schedule::EnsureGathered(int unit, Actions& actions) {
  State& state = states_[unit];
  if (state.gather == Gather::kSharded) StartGather(unit, actions);
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
    state.gather = Gather::kGathered;
  }
  state.requested = false;
  if (guess_ == unit) guess_ = kNone;
}

// The units around the running one are gathered for as long as it runs, and
// those that do not reshard until their backward: they are not what the limit
// is about.
void Schedule::Prefetch(int unit, int running_unit, Actions& actions) {
  if (unit == kNone || IsUnsharded(unit)) return;
  int gathered = 0;
  for (int i : unsharded_) {
    const bool kept = !units_[i].reshard_after_forward &&
                      !states_[i].running() && i != guess_;
    gathered += !kept && !IsAncestor(i, running_unit);
  }
  // The root as the running unit is not counted either.
  if (running_unit == kRoot) --gathered;
  if (gathered >= options_.max_gathered_units) return;
  StartGather(unit, actions);
  guess_ = unit;
}

// Reading takes longer than gathering, so it starts further ahead, by the same
// prediction.
void Schedule::LoadAhead(bool forward, Actions& actions) {
  if (!rests_elsewhere_) return;
  const std::vector<int>& order =
      forward ? previous_forward_order_ : post_forward_order_;
  for (int i = 0; i < options_.load_distance; ++i) {
    // Of the units to come, forward_cursor_ is the first, backward_cursor_ one
    // past the last.
    const size_t place =
        forward ? forward_cursor_ + i : backward_cursor_ - 1 - i;
    if (place >= order.size()) return;
    const int unit = order[place];
    State& state = states_[unit];
    if (!units_[unit].rests_elsewhere || state.loading || state.has_part ||
        state.gather != Gather::kSharded) {
      continue;
    }
    actions.push_back({ActionKind::kLoad, unit});
    state.loading = true;
  }
}

void Schedule::StopLoading() {
  for (State& state : states_) state.loading = false;
}

void Schedule::Free(int unit, Actions& actions, ActionKind how) {
  State& state = states_[unit];
  if (state.gather == Gather::kSharded) return;
  // Memory a collective still writes cannot be given back.
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
  }
  actions.push_back({how, unit});
  state.gather = Gather::kSharded;
  // Outside forward and backward nobody computes with it.
  state.is_read &= in_forward() || in_backward_;
  state.is_copy = false;
  state.requested = false;
  state.kept = false;
  if (guess_ == unit) guess_ = kNone;
  unsharded_.erase(
      std::lower_bound(unsharded_.begin(), unsharded_.end(), unit));
}

void Schedule::FreeUnless(bool (*keep)(const State&), Actions& actions) {
  const std::vector<int> unsharded = unsharded_;
  for (int unit : unsharded) {
    if (!keep(states_[unit])) Free(unit, actions);
  }
}

void Schedule::FreeWrongGuess(int needed_unit, Actions& actions) {
  if (guess_ != kNone && guess_ != needed_unit) Free(guess_, actions);
}

void Schedule::DropParts(Actions& actions) {
  for (int i = 0; num_parts_ > 0; ++i) {
    if (!states_[i].has_part) continue;
    actions.push_back({ActionKind::kDropPart, i});
    states_[i].has_part = false;
    --num_parts_;
  }
}

bool Schedule::IsAncestor(int ancestor, int unit) const {
  for (int i = units_[unit].parent; i != kNone; i = units_[i].parent) {
    if (i == ancestor) return true;
  }
  return false;
}

int Schedule::PredictForward(int unit) {
  const auto begin = previous_forward_order_.begin();
  const auto end = previous_forward_order_.end();
  const auto found = std::find(begin + forward_cursor_, end, unit);
  if (found == end) return kNone;
  forward_cursor_ = found + 1 - begin;
  return found + 1 == end ? kNone : *(found + 1);
}

int Schedule::PredictBackward(int unit) {
  size_t i = backward_cursor_;
  while (i > 0 && post_forward_order_[i - 1] != unit) --i;
  if (i == 0) return kNone;
  backward_cursor_ = i - 1;
  return backward_cursor_ == 0 ? kNone
                               : post_forward_order_[backward_cursor_ - 1];
}

}  // namespace fsdp
