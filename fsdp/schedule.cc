#include "fsdp/schedule.h"

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
  }
  return "?";
}

const char* Name(ActionKind kind) {
  switch (kind) {
    case ActionKind::kGather:
      return "Gather";
    case ActionKind::kWaitGather:
      return "WaitGather";
    case ActionKind::kFree:
      return "Free";
    case ActionKind::kFillReduceBuffer:
      return "FillReduceBuffer";
    case ActionKind::kReduce:
      return "Reduce";
    case ActionKind::kWaitReduce:
      return "WaitReduce";
  }
  return "?";
}

}  // namespace

std::string ToString(const Event& event) {
  if (event.kind == EventKind::kEndOfBackward ||
      event.kind == EventKind::kReset) {
    return Name(event.kind);
  }
  return absl::StrCat(Name(event.kind), "(", event.unit, ")");
}

std::string ToString(const Action& action) {
  return absl::StrCat(Name(action.kind), "(", action.unit, ")");
}

Schedule::Schedule(std::vector<ScheduledUnit> units, ScheduleOptions options)
    : units_(std::move(units)), options_(options), states_(units_.size()) {
  FSDP_CHECK(!units_.empty());
  FSDP_CHECK(options_.max_reduce_buffers >= 1);
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
      PreBackward(event.unit, actions);
      break;
    case EventKind::kPostBackward:
      PostBackward(event, actions);
      break;
    case EventKind::kEndOfBackward:
      EndOfBackward(actions);
      break;
    case EventKind::kReset:
      Reset(actions);
      break;
  }
  return actions;
}

absl::Status Schedule::CheckPreForward(const Event& event) const {
  const bool inner_first =
      event.unit != kRoot && !in_forward() && !event.recomputes;
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

void Schedule::PreForward(const Event& event, Actions& actions) {
  const int unit = event.unit;
  // The order of the real forward stays, and backward has already prefetched
  // what comes next.
  if (event.recomputes) {
    EnterBackward();
    EnsureGathered(unit, actions);
    forward_stack_.push_back(unit);
    ++states_[unit].forwards;
    return;
  }
  if (!in_forward()) BeginIteration(actions);
  forward_order_.push_back(unit);
  forward_stack_.push_back(unit);
  ++states_[unit].forwards;
  FreeWrongGuesses(unit, actions);
  EnsureGathered(unit, actions);
  const int next = PredictForward(unit);
  if (options_.forward_prefetch) Prefetch(next, unit, actions);
}

// Shards may have been written since a unit was kept after its forward, by the
// optimizer or by the user: nothing gathered survives into a new iteration.
void Schedule::BeginIteration(Actions& actions) {
  FreeAll(actions);
  forward_order_.clear();
  post_forward_order_.clear();
  forward_cursor_ = 0;
}

void Schedule::PostForward(const Event& event, Actions& actions) {
  forward_stack_.pop_back();
  --states_[event.unit].forwards;
  // What is recomputed is needed again at once, by its backward.
  const bool keep =
      event.expects_backward &&
      (event.recomputes || !units_[event.unit].reshard_after_forward);
  if (!keep && !states_[event.unit].running()) Free(event.unit, actions);
  if (event.recomputes) return;
  if (event.expects_backward) post_forward_order_.push_back(event.unit);
  if (!in_forward()) {
    FreeWrongGuesses(kNone, actions);
    previous_forward_order_ = forward_order_;
  }
}

void Schedule::EnterBackward() {
  if (in_backward_) return;
  in_backward_ = true;
  backward_cursor_ = post_forward_order_.size();
}

void Schedule::PreBackward(int unit, Actions& actions) {
  EnterBackward();
  ++states_[unit].backwards;
  FreeWrongGuesses(unit, actions);
  EnsureGathered(unit, actions);
  const int next = PredictBackward(unit);
  if (options_.backward_prefetch) Prefetch(next, unit, actions);
}

void Schedule::PostBackward(const Event& event, Actions& actions) {
  State& state = states_[event.unit];
  // A unit whose output carries no gradient gets here without PreBackward.
  EnterBackward();
  state.backwards = std::max(0, state.backwards - 1);
  if (event.reduces) {
    if (num_reductions_in_flight() >= options_.max_reduce_buffers) {
      actions.push_back({ActionKind::kWaitReduce, reductions_.front()});
      reductions_.pop_front();
    }
    actions.push_back({ActionKind::kFillReduceBuffer, event.unit});
  }
  if (!state.running()) Free(event.unit, actions);
  if (event.reduces) {
    actions.push_back({ActionKind::kReduce, event.unit});
    reductions_.push_back(event.unit);
  }
}

// Units that were gathered but never reached, for example because their output
// was not used in the loss, are freed here. A backward inside a forward leaves
// the units of that forward alone.
void Schedule::EndOfBackward(Actions& actions) {
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    states_[i].backwards = 0;
    if (!states_[i].running()) Free(i, actions);
  }
  for (int unit : reductions_) {
    actions.push_back({ActionKind::kWaitReduce, unit});
  }
  reductions_.clear();
  in_backward_ = false;
}

void Schedule::Reset(Actions& actions) {
  FreeAll(actions);
  reductions_.clear();
  forward_stack_.clear();
  for (State& state : states_) state.forwards = state.backwards = 0;
  in_backward_ = false;
  forward_order_.clear();
  post_forward_order_.clear();
}

void Schedule::EnsureGathered(int unit, Actions& actions) {
  State& state = states_[unit];
  if (state.gather == Gather::kSharded) {
    actions.push_back({ActionKind::kGather, unit});
    state.gather = Gather::kInFlight;
  }
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
    state.gather = Gather::kGathered;
  }
  state.prefetched = false;
}

// The units around the running one are gathered for as long as it runs, and
// those that do not reshard until their backward: they are not what the limit
// is about.
void Schedule::Prefetch(int unit, int running_unit, Actions& actions) {
  if (unit == kNone || states_[unit].gather != Gather::kSharded) return;
  int gathered = 0;
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    const bool kept = !units_[i].reshard_after_forward &&
                      !states_[i].running() && !states_[i].prefetched;
    gathered += IsUnsharded(i) && !kept && !IsAncestor(i, running_unit);
  }
  // The root as the running unit is not counted either.
  if (running_unit == kRoot) --gathered;
  if (gathered >= options_.max_gathered_units) return;
  actions.push_back({ActionKind::kGather, unit});
  states_[unit].gather = Gather::kInFlight;
  states_[unit].prefetched = true;
}

void Schedule::Free(int unit, Actions& actions) {
  State& state = states_[unit];
  if (state.gather == Gather::kSharded) return;
  // Memory a collective still writes cannot be given back.
  if (state.gather == Gather::kInFlight) {
    actions.push_back({ActionKind::kWaitGather, unit});
  }
  actions.push_back({ActionKind::kFree, unit});
  state.gather = Gather::kSharded;
  state.prefetched = false;
}

void Schedule::FreeAll(Actions& actions) {
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) Free(i, actions);
}

void Schedule::FreeWrongGuesses(int needed_unit, Actions& actions) {
  for (int i = 0; i < static_cast<int>(units_.size()); ++i) {
    if (i != needed_unit && states_[i].prefetched) Free(i, actions);
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
