#include "fsdp/schedule/testing/schedule_checker.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace fsdp::testing {

ScheduleChecker::ScheduleChecker(std::vector<ScheduledUnit> units,
                                 ScheduleOptions options)
    : specs_(std::move(units)), options_(options), units_(specs_.size()) {
  for (const ScheduledUnit& unit : specs_) shares_memory_ |= unit.shares_memory;
}

std::string ScheduleChecker::Check(const Event& event,
                                   const absl::StatusOr<Actions>& actions) {
  const bool refused = !actions.ok();
  if (refused != MustBeRefused(event)) {
    return absl::StrCat(ToString(event), refused ? ": refused: " : ": accepted",
                        refused ? actions.status().ToString() : "");
  }
  if (refused) return "";
  BeforeActions(event);
  for (const Action& action : *actions) {
    const std::string error = Apply(event, action);
    if (!error.empty()) {
      return absl::StrCat(ToString(action), " of ", ToString(event), ": ",
                          error);
    }
  }
  std::string error = CheckCounts(event, *actions);
  if (error.empty()) error = AfterActions(event);
  if (error.empty()) error = CheckState(event);
  if (error.empty()) error = CheckEnds(event);
  if (error.empty()) error = CheckFences(event);
  return error.empty() ? "" : absl::StrCat(ToString(event), ": ", error);
}

bool ScheduleChecker::MustBeRefused(const Event& event) const {
  const Unit& unit = units_[event.unit];
  switch (event.kind) {
    case EventKind::kPreForward:
      return event.recomputes
                 ? unit.stepped
                 : event.unit != 0 && forwards_.empty() && event.records_graph;
    case EventKind::kPostForward:
      return forwards_.empty() || forwards_.back() != event.unit;
    case EventKind::kPreBackward:
      return unit.stepped;
    case EventKind::kPostBackward:
      return event.reduces &&
             (unit.stepped || (options_.step_in_backward &&
                               event.synchronizes && !forwards_.empty()));
    case EventKind::kReshard:
      return unit.in_use();
    case EventKind::kRelease:
    case EventKind::kSetReduction:
      return !forwards_.empty() || in_backward_;
    default:
      return false;
  }
}

bool ScheduleChecker::BeginsIteration(const Event& event) const {
  return event.kind == EventKind::kPreForward && !event.recomputes &&
         forwards_.empty();
}

// Keeps where values and gradients are, and the user's settings.
void ScheduleChecker::Reset(Unit& unit) {
  const Unit before = unit;
  unit = Unit();
  unit.memory = before.memory;
  unit.has_part = before.has_part;
  unit.shard = before.shard;
  unit.has_whole_gradients = before.has_whole_gradients;
  unit.stepped = before.stepped;
  unit.has_sums = before.has_sums;
  unit.synchronizes = before.synchronizes;
  unit.all_reduces = before.all_reduces;
}

// Notes what ends before the actions are carried out.
void ScheduleChecker::BeforeActions(const Event& event) {
  Unit& unit = units_[event.unit];
  begins_iteration_ = BeginsIteration(event);
  switch (event.kind) {
    case EventKind::kPreForward:
      in_backward_ |= event.recomputes;
      for (Unit& each : units_) {
        if (!begins_iteration_) break;
        shards_open_ = false;
        each.may_stay = false;
        each.uses_to_come = 0;
      }
      if (!event.recomputes) unit.stepped = false;
      break;
    case EventKind::kPostForward:
      unit.may_stay |=
          event.expects_backward &&
          (event.recomputes || !specs_[event.unit].reshard_after_forward);
      unit.uses_to_come += !event.recomputes;
      --unit.forwards;
      forwards_.pop_back();
      break;
    case EventKind::kPreBackward:
      in_backward_ = true;
      break;
    case EventKind::kPostBackward:
      in_backward_ = true;
      unit.backwards = std::max(0, unit.backwards - 1);
      unit.may_stay = false;
      unit.kept = !event.synchronizes && specs_[event.unit].keep_until_sync &&
                  unit.memory == Memory::kGathered;
      break;
    case EventKind::kEndOfBackward:
      in_backward_ = false;
      for (Unit& each : units_) {
        each.backwards = 0;
        each.may_stay = each.requested = false;
        each.kept &= !event.synchronizes;
      }
      break;
    case EventKind::kSetReduction:
      unit.synchronizes = event.synchronizes;
      unit.all_reduces = event.all_reduces;
      break;
    case EventKind::kReset:
      in_backward_ = false;
      shards_open_ = false;
      forwards_.clear();
      reductions_.clear();
      for (Unit& each : units_) Reset(each);
      break;
    default:
      break;
  }
}

// Notes what begins after the actions.
std::string ScheduleChecker::AfterActions(const Event& event) {
  Unit& unit = units_[event.unit];
  switch (event.kind) {
    case EventKind::kPreForward:
      forwards_.push_back(event.unit);
      return BeginToUse(unit, unit.forwards);
    case EventKind::kPreBackward:
      return BeginToUse(unit, unit.backwards);
    case EventKind::kPostBackward:
      unit.uses_to_come = std::max(0, unit.uses_to_come - 1);
      return "";
    case EventKind::kUnshard:
      if (forwards_.empty() && !in_backward_ && !unit.requested &&
          unit.gathered != unit.shard) {
        return "not the values of now";
      }
      unit.requested = true;
      unit.guessed = false;
      return "";
    case EventKind::kWaitUnshard:
      if (unit.memory != Memory::kGathered) return "not waited for";
      if (forwards_.empty() && !in_backward_ && unit.gathered != unit.shard &&
          !unit.requested) {
        return "not the values of now";
      }
      unit.guessed = false;
      unit.may_stay = true;
      return "";
    case EventKind::kReshard:
      return unit.memory == Memory::kSharded ? "" : "not freed";
    case EventKind::kEndOfBackward:
      if (!event.synchronizes || !forwards_.empty()) return "";
      [[fallthrough]];
    case EventKind::kRelease:
      // The optimizer steps, or the user writes.
      for (Unit& each : units_) ++each.shard;
      return "";
    default:
      return "";
  }
}

// A unit inside itself continues with the values that it has.
std::string ScheduleChecker::BeginToUse(Unit& unit, int& uses) {
  unit.guessed = unit.requested = false;
  const bool is_current = unit.in_use() || unit.gathered == unit.shard;
  ++uses;
  return is_current ? "" : "computes with old values";
}

std::string ScheduleChecker::Apply(const Event& event, const Action& action) {
  Unit& unit = units_[action.unit];
  switch (action.kind) {
    case ActionKind::kLoad:
      if (!specs_[action.unit].rests_elsewhere) return "rests here";
      if (unit.memory != Memory::kSharded) return "is on its way already";
      return "";
    case ActionKind::kGather:
      return ApplyGather(event, action.unit);
    case ActionKind::kGatherCopy:
      return ApplyGatherCopy(event, action.unit);
    case ActionKind::kWaitGather:
      if (unit.memory != Memory::kInFlight) return "no gather in flight";
      unit.memory = Memory::kGathered;
      return "";
    case ActionKind::kFree:
    case ActionKind::kShrink:
      return ApplyFree(event, action);
    case ActionKind::kDropPart:
      if (!unit.has_part) return "has no part";
      unit.has_part = false;
      return EndsParts(event) ? "" : "a part dropped too early";
    case ActionKind::kAccumulate:
      if (event.kind != EventKind::kPostBackward || Reduces(event) ||
          action.unit != event.unit) {
        return "out of place";
      }
      unit.has_whole_gradients = true;
      return "";
    case ActionKind::kStep:
      return ApplyStep(event, action.unit);
    case ActionKind::kOpenShards:
      return ApplyOpen(event);
    case ActionKind::kCloseShards:
      return ApplyClose(event);
    default:
      return ApplyReduction(event, action);
  }
}

std::string ScheduleChecker::ApplyOpen(const Event& event) {
  if (!begins_iteration_) return "no forward begins";
  if (shards_open_) return "open already";
  shards_open_ = true;
  ApplyFence();
  // Gathered units have old values, and other ranks may write over them.
  for (size_t i = 0; i < units_.size(); ++i) {
    if (units_[i].is_read) {
      return absl::StrCat(ToString(event), " reads ", i, " as it was before");
    }
  }
  return "";
}

std::string ScheduleChecker::ApplyClose(const Event& event) {
  if (!forwards_.empty()) return "inside a forward";
  if (event.kind != EventKind::kPostForward &&
      event.kind != EventKind::kEndOfBackward) {
    return "nothing has ended";
  }
  const bool is_read =
      std::any_of(units_.begin(), units_.end(),
                  [](const Unit& unit) { return unit.is_read; });
  if (event.kind == EventKind::kEndOfBackward && !is_read) {
    return "a fence that nothing needs";
  }
  shards_open_ = false;
  ApplyFence();
  return "";
}

void ScheduleChecker::ApplyFence() {
  for (size_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    unit.is_read = specs_[i].shares_memory && !unit.is_copy &&
                   unit.memory != Memory::kSharded;
  }
}

// Outside forward and backward, only the user's requests are gathered, apart
// from memory that other ranks write.
std::string ScheduleChecker::ApplyGatherCopy(const Event& event, int index) {
  Unit& unit = units_[index];
  if (!forwards_.empty() || in_backward_) return "a copy of shards at rest";
  if ((event.kind != EventKind::kUnshard &&
       event.kind != EventKind::kWaitUnshard) ||
      index != event.unit) {
    return "nothing asks for it";
  }
  if (unit.memory != Memory::kSharded) return "gathered already";
  unit.memory = Memory::kInFlight;
  unit.is_copy = true;
  unit.gathered = unit.shard;
  return "";
}

std::string ScheduleChecker::ApplyGather(const Event& event, int index) {
  Unit& unit = units_[index];
  if (forwards_.empty() && !in_backward_ && !begins_iteration_) {
    return "shards may be written meanwhile";
  }
  if (specs_[index].shares_memory && !shards_open_ && !in_backward_) {
    return "ranks may still write their shards";
  }
  if (unit.memory != Memory::kSharded) return "gathered already";
  unit.memory = Memory::kInFlight;
  unit.is_read = specs_[index].shares_memory;
  ++unit.gathers;
  unit.gathered = unit.has_part ? unit.part : unit.shard;
  unit.guessed = index != event.unit;
  if (unit.guessed) return CheckGuess(event);
  const bool asks = event.kind == EventKind::kPreForward ||
                    event.kind == EventKind::kPreBackward ||
                    event.kind == EventKind::kUnshard ||
                    event.kind == EventKind::kWaitUnshard;
  return asks ? "" : "nothing asks for it";
}

std::string ScheduleChecker::ApplyFree(const Event& event,
                                       const Action& action) {
  Unit& unit = units_[action.unit];
  if (unit.memory != Memory::kGathered) return "not gathered";
  if (unit.in_use()) return "still in use";
  const bool for_another =
      action.unit != event.unit || event.kind == EventKind::kPreForward;
  // A request inside a forward lasts as long as that does.
  const bool ends_forward =
      event.kind == EventKind::kPostForward && forwards_.empty();
  if (unit.requested && for_another && event.kind != EventKind::kRelease &&
      (unit.is_copy || !ends_forward)) {
    return "the user has asked for it";
  }
  unit.memory = Memory::kSharded;
  // The unit was kept for a backward, and none is under way.
  if (forwards_.empty() && !in_backward_ &&
      event.kind != EventKind::kEndOfBackward) {
    unit.is_read = false;
  }
  unit.is_copy = false;
  unit.guessed = unit.requested = unit.kept = unit.may_stay = false;
  if (action.kind == ActionKind::kFree) return "";
  if (event.kind != EventKind::kPostForward || event.recomputes ||
      !event.expects_backward || action.unit != event.unit ||
      !specs_[action.unit].keeps_part || unit.has_part) {
    return "no place to take a part";
  }
  unit.has_part = true;
  unit.part = unit.gathered;
  return "";
}

std::string ScheduleChecker::ApplyReduction(const Event& event,
                                            const Action& action) {
  Unit& unit = units_[action.unit];
  switch (action.kind) {
    case ActionKind::kFillReduceBuffer:
      return ApplyFill(event, action.unit);
    case ActionKind::kReduce:
      if (filled_ != action.unit) return "nothing to reduce";
      filled_ = -1;
      reductions_.push_back(
          {action.unit, !specs_[action.unit].replicated,
           specs_[action.unit].replicated && !unit.all_reduces,
           event.kind == EventKind::kPostBackward &&
                   unit.memory == Memory::kSharded
               ? unit.gathers
               : -1});
      return "";
    case ActionKind::kReplicate:
      return ApplyReplicate(action.unit);
    case ActionKind::kKeepSums:
      return ApplyKeepSums(action.unit);
    case ActionKind::kReplicateSums:
      return ApplyReplicateSums(event, action.unit);
    case ActionKind::kWaitReduce:
      if (reductions_.empty() || reductions_.front().unit != action.unit) {
        return "not the oldest reduction";
      }
      // The network has something to do while the rank waits.
      for (const Reduction& each : reductions_) {
        if (!each.replicated && !each.keeps_sums) return "not replicated";
      }
      // Every rank has started it, after what it had freed by then.
      if (reductions_.front().gathers == unit.gathers) unit.is_read = false;
      reductions_.pop_front();
      unit.step_due = options_.step_in_backward;
      return "";
    default:
      return "unexpected action";
  }
}

std::string ScheduleChecker::ApplyReplicate(int index) {
  const auto next = std::find_if(reductions_.begin(), reductions_.end(),
                                 [](const Reduction& each) {
                                   return !each.replicated && !each.keeps_sums;
                                 });
  if (next == reductions_.end() || next->unit != index) {
    return "not the oldest reduction to replicate";
  }
  next->replicated = true;
  units_[index].has_sums = false;
  return "";
}

std::string ScheduleChecker::ApplyKeepSums(int index) {
  if (reductions_.empty() || reductions_.front().unit != index) {
    return "not the oldest reduction";
  }
  if (!reductions_.front().keeps_sums) return "is to be all-reduced";
  Unit& unit = units_[index];
  if (reductions_.front().gathers == unit.gathers) unit.is_read = false;
  reductions_.pop_front();
  unit.has_sums = true;
  return "";
}

std::string ScheduleChecker::ApplyReplicateSums(const Event& event, int index) {
  Unit& unit = units_[index];
  if (event.kind != EventKind::kEndOfBackward || !event.synchronizes ||
      !unit.synchronizes || !unit.all_reduces) {
    return "sums are not due";
  }
  if (!unit.has_sums) return "has no sums";
  unit.has_sums = false;
  reductions_.push_back(
      {index, /*replicated=*/true, /*keeps_sums=*/false, /*gathers=*/-1});
  return static_cast<int>(reductions_.size()) <= options_.max_reduce_buffers
             ? ""
             : "too many reductions";
}

// Returns whether the gradients of this event's unit are reduced.
bool ScheduleChecker::Reduces(const Event& event) const {
  return event.synchronizes && units_[event.unit].synchronizes;
}

std::string ScheduleChecker::ApplyFill(const Event& event, int index) {
  Unit& unit = units_[index];
  if (filled_ != -1) return "another one is filled and not reduced";
  if (!event.synchronizes || !unit.synchronizes) {
    return "in a backward that does not synchronise";
  }
  const bool due =
      event.kind == EventKind::kPostBackward
          ? index == event.unit && event.reduces
          : unit.has_whole_gradients && event.kind == EventKind::kEndOfBackward;
  if (!due) return "no gradients to reduce";
  unit.has_whole_gradients = false;
  filled_ = index;
  return static_cast<int>(reductions_.size()) < options_.max_reduce_buffers
             ? ""
             : "too many reduce buffers";
}

std::string ScheduleChecker::ApplyStep(const Event& event, int index) {
  Unit& unit = units_[index];
  if (!unit.step_due) return "nothing has been reduced";
  if (!forwards_.empty()) return "inside a forward";
  if (unit.stepped) return "the second one";
  if (unit.is_read) return "another rank may be reading its shard";
  for (const Reduction& reduction : reductions_) {
    if (reduction.unit == index) return "a reduction is in flight";
  }
  if (event.kind != EventKind::kEndOfBackward && unit.uses_to_come > 0) {
    return "a backward of the unit is to come";
  }
  unit.step_due = false;
  unit.stepped = true;
  ++unit.shard;
  return "";
}

// Checks a gather that no event needs yet.
std::string ScheduleChecker::CheckGuess(const Event& event) const {
  const bool forward = event.kind == EventKind::kPreForward;
  if ((!forward && event.kind != EventKind::kPreBackward) || event.recomputes) {
    return "prefetch while nothing starts to run";
  }
  if (!(forward ? options_.forward_prefetch : options_.backward_prefetch)) {
    return "prefetch that is turned off";
  }
  std::vector<bool> around(units_.size(), false);
  around[0] = true;
  for (int i = specs_[event.unit].parent; i >= 0; i = specs_[i].parent) {
    around[i] = true;
  }
  int gathered = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (unit.memory == Memory::kSharded || around[i]) continue;
    const bool runs = unit.in_use() || static_cast<int>(i) == event.unit;
    const bool kept = !specs_[i].reshard_after_forward && !runs;
    gathered += unit.guessed || !kept;
  }
  return gathered > options_.max_gathered_units ? "too many units gathered"
                                                : "";
}

std::string ScheduleChecker::CheckCounts(const Event& event,
                                         const Actions& actions) const {
  if (filled_ != -1) return "a buffer is filled and not reduced";
  for (const Reduction& each : reductions_) {
    if (each.replicated || each.keeps_sums || specs_[each.unit].sharded) {
      continue;
    }
    return "an all-reduce that waits for nothing is not started";
  }
  if (event.kind != EventKind::kPostBackward) return "";
  const auto count = [&actions](ActionKind kind) {
    return std::count_if(
        actions.begin(), actions.end(),
        [kind](const Action& action) { return action.kind == kind; });
  };
  const bool reduces = event.reduces && Reduces(event);
  const bool keeps = event.reduces && !Reduces(event);
  return count(ActionKind::kReduce) == reduces &&
                 count(ActionKind::kAccumulate) == keeps
             ? ""
             : "wrong number of reductions";
}

std::string ScheduleChecker::CheckState(const Event& event) const {
  int guesses = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (unit.in_use() && unit.memory != Memory::kGathered) {
      return absl::StrCat(i, " computes but is not gathered");
    }
    if (unit.memory == Memory::kSharded || unit.in_use()) continue;
    guesses += unit.guessed;
    if (!unit.guessed && !unit.may_stay && !unit.requested && !unit.kept) {
      return absl::StrCat(i, " stays gathered for nothing");
    }
  }
  if (guesses > 1) return "more than one guess in flight";
  const bool left_forward = event.kind == EventKind::kPostForward &&
                            forwards_.empty() && !in_backward_;
  return left_forward && guesses > 0 ? "a guess is left" : "";
}

bool ScheduleChecker::EndsParts(const Event& event) const {
  return begins_iteration_ || event.kind == EventKind::kEndOfBackward ||
         event.kind == EventKind::kReset || event.kind == EventKind::kRelease;
}

// Checks what must be over after some events.
std::string ScheduleChecker::CheckEnds(const Event& event) const {
  const bool ends_backward = event.kind == EventKind::kEndOfBackward;
  const bool ends = ends_backward || event.kind == EventKind::kReset;
  if (ends && !reductions_.empty()) return "a reduction is left";
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (EndsParts(event) && unit.has_part) {
      return absl::StrCat("the part of ", i, " is left");
    }
    if (ends && unit.step_due) return absl::StrCat(i, " has not stepped");
    if (ends && unit.guessed) return "a guess is left";
    const bool reduces = ends_backward && event.synchronizes &&
                         unit.synchronizes && forwards_.empty();
    if (reduces && unit.has_whole_gradients) {
      return absl::StrCat("the gradients of ", i, " are left");
    }
    if (reduces && unit.all_reduces && unit.has_sums) {
      return absl::StrCat("the sums of ", i, " are left");
    }
    if ((event.kind == EventKind::kReset ||
         event.kind == EventKind::kRelease) &&
        unit.memory != Memory::kSharded) {
      return absl::StrCat(i, " is left gathered");
    }
  }
  return "";
}

std::string ScheduleChecker::CheckFences(const Event& event) const {
  const bool is_idle = forwards_.empty() && !in_backward_;
  const bool ends_forward = event.kind == EventKind::kPostForward && is_idle;
  if (shares_memory_ && begins_iteration_ && !shards_open_) {
    return "forward opens no shards";
  }
  if (ends_forward && shards_open_) return "shards are left open";
  for (size_t i = 0; is_idle && i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    const bool is_there = unit.memory != Memory::kSharded;
    // Nobody reads what stays for a backward before that.
    if (unit.is_read && !is_there && event.kind != EventKind::kReset) {
      return absl::StrCat("another rank may be reading ", i);
    }
    if (unit.requested && is_there && !unit.is_copy) {
      return absl::StrCat(i, " is held for the user in others' memory");
    }
  }
  return "";
}

}  // namespace fsdp::testing
