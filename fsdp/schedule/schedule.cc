#include "fsdp/schedule/schedule.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

constexpr int kRoot = 0;
constexpr int kNone = UnitOrder::kNone;

}  // namespace

int UnitOrder::NextInForward(int unit) {
  const auto begin = previous_forward_.begin();
  const auto end = previous_forward_.end();
  const auto found =
      std::find(begin + static_cast<int64_t>(forward_cursor_), end, unit);
  if (found == end) return kNone;
  forward_cursor_ = found + 1 - begin;
  return ToComeInForward(0);
}

int UnitOrder::NextInBackward(int unit) {
  // A forward inside the backward may have begun a new order.
  size_t i = std::min(backward_cursor_, post_forward_.size());
  while (i > 0 && post_forward_[i - 1] != unit) --i;
  if (i == 0) return kNone;
  backward_cursor_ = i - 1;
  return ToComeInBackward(0);
}

int UnitOrder::ToComeInForward(size_t i) const {
  const size_t place = forward_cursor_ + i;
  return place < previous_forward_.size() ? previous_forward_[place] : kNone;
}

int UnitOrder::ToComeInBackward(size_t i) const {
  return i < backward_cursor_ && backward_cursor_ <= post_forward_.size()
             ? post_forward_[backward_cursor_ - 1 - i]
             : kNone;
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
  Actions actions;
  switch (event.kind) {
    case EventKind::kPreForward:
      FSDP_RETURN_IF_ERROR(CheckPreForward(event));
      PreForward(event, actions);
      break;
    case EventKind::kPostForward:
      FSDP_RETURN_IF_ERROR(CheckPostForward(event));
      PostForward(event, actions);
      break;
    case EventKind::kPreBackward:
      FSDP_RETURN_IF_ERROR(CheckBackward(event));
      PreBackward(event.unit, actions);
      break;
    case EventKind::kPostBackward:
      FSDP_RETURN_IF_ERROR(CheckBackward(event));
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
      if (states_[event.unit].running()) {
        return absl::FailedPreconditionError(
            absl::StrCat("unit ", units_[event.unit].name,
                         " cannot be resharded while it computes"));
      }
      Free(event.unit, actions);
      break;
    case EventKind::kRelease:
      FSDP_CHECK(!in_forward() && !in_backward_);
      FreeUnless([](const State&) { return false; }, actions);
      DropParts(actions);
      break;
    case EventKind::kSetReduction:
      FSDP_CHECK(!in_forward() && !in_backward_);
      states_[event.unit].synchronizes = event.synchronizes;
      states_[event.unit].all_reduces = event.all_reduces;
      break;
  }
  return actions;
}

void Schedule::PreForward(const Event& event, Actions& actions) {
  const int unit = event.unit;
  State& state = states_[unit];
  // The order of the first forward stays, and backward has already prefetched
  // the next unit.
  if (event.recomputes) {
    EnterBackward();
    EnsureGathered(unit, actions);
    forward_stack_.push_back(unit);
    ++state.forwards;
    return;
  }
  if (!in_forward()) BeginIteration(actions);
  order_.AddForward(unit);
  forward_stack_.push_back(unit);
  ++state.forwards;
  state.stepped = false;
  FreeWrongGuess(unit, actions);
  EnsureGathered(unit, actions);
  const int next = order_.NextInForward(unit);
  if (options_.forward_prefetch) Prefetch(next, unit, actions);
  LoadAhead(/*forward=*/true, actions);
}

// Frees what earlier forwards left: the optimizer or the user may have written
// the shards since. Only the user's requests stay, and what is kept between
// accumulating backwards, where no optimizer steps.
void Schedule::BeginIteration(Actions& actions) {
  FreeUnless(
      [](const State& state) {
        return (state.requested && state.is_copy) || state.kept;
      },
      actions);
  DropParts(actions);
  if (shares_memory_) PassFence(ActionKind::kOpenShards, actions);
  for (State& state : states_) {
    // One loss may be of several forwards, but not of one without grad.
    if (backward_has_ended_) {
      state.backwards_to_come = 0;
    } else if (!order_.expects_backward()) {
      state.backwards_to_come =
          std::max(0, state.backwards_to_come - state.of_last_forward);
    }
    state.of_last_forward = 0;
    state.loading = false;
  }
  backward_has_ended_ = false;
  order_.BeginForward();
}

void Schedule::PostForward(const Event& event, Actions& actions) {
  State& state = states_[event.unit];
  forward_stack_.pop_back();
  --state.forwards;
  if (event.recomputes) {
    // The backward of what was recomputed comes at once and needs the unit.
    if (!event.expects_backward && !state.running()) {
      Free(event.unit, actions);
    }
    return;
  }
  // A unit without grad may still be recomputed, and then has a backward.
  ++state.backwards_to_come;
  ++state.of_last_forward;
  if (event.expects_backward) order_.AddExpectedBackward(event.unit);
  const bool keep =
      event.expects_backward && !units_[event.unit].reshard_after_forward;
  if (!keep && !state.running()) {
    const bool shrinks = event.expects_backward &&
                         units_[event.unit].keeps_part && !state.has_part;
    Free(event.unit, actions,
         shrinks ? ActionKind::kShrink : ActionKind::kFree);
    if (shrinks) {
      state.has_part = true;
      ++num_parts_;
    }
  }
  if (in_forward()) return;
  // Frees what the user has requested inside the forward: shards may be written
  // from here on. What is kept for a backward, which may never come, is not
  // read before it.
  FreeWrongGuess(kNone, actions);
  order_.EndForward();
  FreeUnless(
      [](const State& any) {
        return !any.requested || any.is_copy || any.running();
      },
      actions);
  if (shares_memory_) PassFence(ActionKind::kCloseShards, actions);
}

void Schedule::EnterBackward() {
  if (in_backward_) return;
  in_backward_ = true;
  order_.BeginBackward();
  for (State& state : states_) state.loading = false;
}

void Schedule::PreBackward(int unit, Actions& actions) {
  EnterBackward();
  ++states_[unit].backwards;
  FreeWrongGuess(unit, actions);
  EnsureGathered(unit, actions);
  const int next = order_.NextInBackward(unit);
  if (options_.backward_prefetch) Prefetch(next, unit, actions);
  LoadAhead(/*forward=*/false, actions);
}

void Schedule::PostBackward(const Event& event, Actions& actions) {
  const int unit = event.unit;
  State& state = states_[unit];
  // A unit whose outputs carry no gradient has had no PreBackward.
  EnterBackward();
  state.backwards = std::max(0, state.backwards - 1);
  // Making room may finish an earlier reduction of this unit; it is not the
  // last.
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
  // Common memory is not kept: a gather costs nothing, and others may write to
  // it.
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

// Starts the previous reduction's all-reduce at the latest here: its
// reduce-scatter had the time of this unit's backward.
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

// All-reduces sums of earlier backwards whose units this backward has not
// reached.
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

// Waits for a gather that the user has requested: it may still read the shards.
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

// Frees units that were gathered but never reached, for example because the
// loss does not use their output, but not the units of a forward around this
// backward. Reduces whole gradients of earlier backwards even if this one has
// not reached their unit, unless they would be stepped inside a forward.
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
  backward_has_ended_ = true;
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
    // A graph from before the step remains unusable.
    state.stepped = before.stepped;
  }
  in_backward_ = false;
  order_.Forget();
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

// Inside forward and backward, shards do not change, and requests end with
// them. Outside, what is gathered for a backward may be older than the shards
// or in memory that others write to: a copy is gathered.
void Schedule::GatherForUser(int unit, Actions& actions) {
  if (in_forward() || in_backward_) {
    if (!IsUnsharded(unit)) StartGather(unit, actions);
    return;
  }
  if (IsHeldForUser(unit)) return;
  Free(unit, actions);
  StartGather(unit, actions, ActionKind::kGatherCopy);
}

// A rank that has passed the fence knows that all ranks have.
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

// Leaves out units around the running one, which stay gathered while it runs,
// and those that stay until their backward: the limit is not for them.
void Schedule::Prefetch(int unit, int running_unit, Actions& actions) {
  if (unit == kNone || IsUnsharded(unit)) return;
  int gathered = 0;
  for (int i : unsharded_) {
    const bool kept = !units_[i].reshard_after_forward &&
                      !states_[i].running() && i != guess_;
    gathered += !kept && !IsAncestor(i, running_unit);
  }
  // The root is not counted as the running unit either.
  if (running_unit == kRoot) --gathered;
  if (gathered >= options_.max_gathered_units) return;
  StartGather(unit, actions);
  guess_ = unit;
}

// Starts reads further ahead than gathers, because they take longer; the
// prediction is the same.
void Schedule::LoadAhead(bool forward, Actions& actions) {
  if (!rests_elsewhere_) return;
  for (int i = 0; i < options_.load_distance; ++i) {
    const int unit =
        forward ? order_.ToComeInForward(i) : order_.ToComeInBackward(i);
    if (unit == kNone) return;
    State& state = states_[unit];
    if (!units_[unit].rests_elsewhere || state.loading || state.has_part ||
        state.gather != Gather::kSharded) {
      continue;
    }
    actions.push_back({ActionKind::kLoad, unit});
    state.loading = true;
  }
}

void Schedule::Free(int unit, Actions& actions, ActionKind how) {
  State& state = states_[unit];
  if (state.gather == Gather::kSharded) return;
  // Memory to which a collective still writes cannot be given back.
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
  }
  actions.push_back({how, unit});
  state.gather = Gather::kSharded;
  // Outside forward and backward, nobody computes with it.
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

namespace {

// In the order of EventKind.
constexpr const char* kEvents[] = {
    "PreForward",    "PostForward",  "PreBackward", "PostBackward",
    "EndOfBackward", "Reset",        "Unshard",     "WaitUnshard",
    "Reshard",       "SetReduction", "Release"};
// In the order of ActionKind.
constexpr const char* kActions[] = {
    "Load",       "Gather",     "GatherCopy",    "WaitGather",       "Free",
    "Shrink",     "DropPart",   "Accumulate",    "FillReduceBuffer", "Reduce",
    "Replicate",  "KeepSums",   "ReplicateSums", "WaitReduce",       "Step",
    "OpenShards", "CloseShards"};
static_assert(std::size(kEvents) ==
              static_cast<size_t>(EventKind::kRelease) + 1);
static_assert(std::size(kActions) ==
              static_cast<size_t>(ActionKind::kCloseShards) + 1);

}  // namespace

const char* Name(EventKind kind) { return kEvents[static_cast<int>(kind)]; }

const char* Name(ActionKind kind) { return kActions[static_cast<int>(kind)]; }

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

absl::Status Schedule::CheckPostForward(const Event& event) const {
  if (in_forward() && forward_stack_.back() == event.unit) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the forward of unit ", units_[event.unit].name,
      " ends, but its iteration was given up after an error inside it: let "
      "exceptions reach the caller of the root's forward"));
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

}  // namespace fsdp
