#include "fsdp/schedule/testing/schedule_checker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace fsdp::testing {

ScheduleChecker::ScheduleChecker(std::vector<ScheduledUnit> units,
                                 ScheduleOptions options)
    : specs_(std::move(units)), options_(options), units_(specs_.size()) {}

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
    default:
      return false;
  }
}

// Notes what ends before the actions are carried out.
void ScheduleChecker::BeforeActions(const Event& event) {
  Unit& unit = units_[event.unit];
  begins_iteration_ = event.kind == EventKind::kPreForward &&
                      !event.recomputes && forwards_.empty();
  switch (event.kind) {
    case EventKind::kPreForward:
      in_backward_ |= event.recomputes;
      for (Unit& each : units_) {
        if (!begins_iteration_) break;
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
      forwards_.clear();
      reductions_.clear();
      // Where values are stays, and so do the user's settings.
      for (Unit& each : units_) {
        const Unit before = each;
        each = Unit();
        each.memory = before.memory;
        each.has_part = before.has_part;
        each.stepped = before.stepped;
        each.synchronizes = before.synchronizes;
        each.all_reduces = before.all_reduces;
      }
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
      unit.guessed = unit.requested = false;
      ++unit.forwards;
      return "";
    case EventKind::kPreBackward:
      unit.guessed = unit.requested = false;
      ++unit.backwards;
      return "";
    case EventKind::kPostBackward:
      unit.uses_to_come = std::max(0, unit.uses_to_come - 1);
      return "";
    case EventKind::kUnshard:
      unit.requested = true;
      unit.guessed = false;
      return "";
    case EventKind::kWaitUnshard:
      if (unit.memory != Memory::kGathered) return "not waited for";
      unit.guessed = false;
      unit.may_stay = true;
      return "";
    case EventKind::kReshard:
      return unit.memory == Memory::kSharded ? "" : "not freed";
    default:
      return "";
  }
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
      // Outside forward and backward, only the user's requests are gathered,
      // apart from memory that other ranks write.
      if (!forwards_.empty() || in_backward_) return "a copy of shards at rest";
      if ((event.kind != EventKind::kUnshard &&
           event.kind != EventKind::kWaitUnshard) ||
          action.unit != event.unit) {
        return "nothing asks for it";
      }
      unit.memory = Memory::kInFlight;
      unit.is_copy = true;
      return "";
    case ActionKind::kWaitGather:
      unit.memory = Memory::kGathered;
      return "";
    case ActionKind::kFree:
    case ActionKind::kShrink:
      return ApplyFree(event, action);
    case ActionKind::kDropPart:
      unit.has_part = false;
      return EndsParts(event) ? "" : "a part dropped too early";
    case ActionKind::kStep:
      if (!forwards_.empty()) return "inside a forward";
      if (event.kind != EventKind::kEndOfBackward && unit.uses_to_come > 0) {
        return "a backward of the unit is to come";
      }
      unit.stepped = true;
      return "";
    case ActionKind::kOpenShards:
      return begins_iteration_ ? "" : "no forward begins";
    case ActionKind::kCloseShards:
      if (!forwards_.empty()) return "inside a forward";
      return event.kind == EventKind::kPostForward ||
                     event.kind == EventKind::kEndOfBackward
                 ? ""
                 : "nothing has ended";
    default:
      return ApplyReduction(event, action);
  }
}

std::string ScheduleChecker::ApplyGather(const Event& event, int index) {
  Unit& unit = units_[index];
  if (forwards_.empty() && !in_backward_ && !begins_iteration_) {
    return "shards may be written meanwhile";
  }
  unit.memory = Memory::kInFlight;
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
  unit.is_copy = false;
  unit.guessed = unit.requested = unit.kept = unit.may_stay = false;
  if (action.kind == ActionKind::kFree) return "";
  if (event.kind != EventKind::kPostForward || event.recomputes ||
      !event.expects_backward || action.unit != event.unit ||
      !specs_[action.unit].keeps_part || unit.has_part) {
    return "no place to take a part";
  }
  unit.has_part = true;
  return "";
}

std::string ScheduleChecker::ApplyReduction(const Event& event,
                                            const Action& action) {
  const Unit& unit = units_[action.unit];
  const ScheduledUnit& spec = specs_[action.unit];
  switch (action.kind) {
    case ActionKind::kAccumulate:
      return "";
    case ActionKind::kFillReduceBuffer:
      return event.synchronizes && unit.synchronizes
                 ? ""
                 : "in a backward that does not synchronise";
    case ActionKind::kReduce:
      reductions_.push_back({action.unit, !spec.replicated,
                             spec.replicated && !unit.all_reduces});
      return "";
    case ActionKind::kReplicate: {
      const auto next = std::find_if(
          reductions_.begin(), reductions_.end(), [](const Reduction& each) {
            return !each.replicated && !each.keeps_sums;
          });
      if (next == reductions_.end() || next->unit != action.unit) {
        return "not the oldest reduction to replicate";
      }
      next->replicated = true;
      return "";
    }
    case ActionKind::kReplicateSums:
      if (event.kind != EventKind::kEndOfBackward || !event.synchronizes ||
          !unit.synchronizes || !unit.all_reduces) {
        return "sums are not due";
      }
      reductions_.push_back(
          {action.unit, /*replicated=*/true, /*keeps_sums=*/false});
      return static_cast<int>(reductions_.size()) <= options_.max_reduce_buffers
                 ? ""
                 : "too many reductions";
    case ActionKind::kKeepSums:
    case ActionKind::kWaitReduce: {
      if (reductions_.empty() || reductions_.front().unit != action.unit) {
        return "not the oldest reduction";
      }
      const bool keeps = action.kind == ActionKind::kKeepSums;
      if (reductions_.front().keeps_sums != keeps) return "ends otherwise";
      // The network has something to do while the rank waits.
      for (const Reduction& each : reductions_) {
        if (!keeps && !each.replicated && !each.keeps_sums) {
          return "not replicated";
        }
      }
      reductions_.pop_front();
      return "";
    }
    default:
      return "unexpected action";
  }
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
  const bool synchronizes =
      event.synchronizes && units_[event.unit].synchronizes;
  return count(ActionKind::kReduce) == (event.reduces && synchronizes) &&
                 count(ActionKind::kAccumulate) ==
                     (event.reduces && !synchronizes)
             ? ""
             : "wrong number of reductions";
}

bool ScheduleChecker::EndsParts(const Event& event) const {
  return begins_iteration_ || event.kind == EventKind::kEndOfBackward ||
         event.kind == EventKind::kReset || event.kind == EventKind::kRelease;
}

// Checks what may be gathered after the event.
std::string ScheduleChecker::CheckState(const Event& event) const {
  const bool is_idle = forwards_.empty() && !in_backward_;
  const bool frees_all =
      event.kind == EventKind::kReset || event.kind == EventKind::kRelease;
  int guesses = 0;
  for (size_t i = 0; i < units_.size(); ++i) {
    const Unit& unit = units_[i];
    if (EndsParts(event) && unit.has_part) {
      return absl::StrCat("the part of ", i, " is left");
    }
    if (unit.memory == Memory::kSharded) continue;
    if (frees_all) return absl::StrCat(i, " is left gathered");
    if (is_idle && unit.requested && !unit.is_copy) {
      return absl::StrCat(i, " is held for the user in others' memory");
    }
    if (unit.in_use()) continue;
    guesses += unit.guessed;
    if (!unit.guessed && !unit.may_stay && !unit.requested && !unit.kept) {
      return absl::StrCat(i, " stays gathered for nothing");
    }
  }
  if (guesses > 1) return "more than one guess in flight";
  const bool ends = event.kind == EventKind::kEndOfBackward ||
                    (event.kind == EventKind::kPostForward && is_idle);
  return ends && guesses > 0 ? "a guess is left" : "";
}

}  // namespace fsdp::testing
