#include "fsdp/schedule/testing/schedule_run.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_checker.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

constexpr int kMaxUnits = 12;
constexpr int kMaxNonsense = 40;
// Events that appear twice are twice as likely.
constexpr EventKind kNonsense[] = {
    EventKind::kPreForward,  EventKind::kPostForward,
    EventKind::kPreForward,  EventKind::kPostForward,
    EventKind::kPreBackward, EventKind::kPostBackward,
    EventKind::kPreBackward, EventKind::kPostBackward,
    EventKind::kUnshard,     EventKind::kWaitUnshard,
    EventKind::kReshard,     EventKind::kRelease,
    EventKind::kReset,       EventKind::kEndOfBackward,
    EventKind::kSetReduction};
constexpr int kNonsenseKinds = sizeof(kNonsense) / sizeof(kNonsense[0]);

// Makes random models and what may happen to them: forwards and backwards in
// any nesting, units that are left out or used twice, recomputation, errors,
// and requests of a user.
class RandomModel {
 public:
  // `choices` outlives this object.
  explicit RandomModel(Choices* choices);

  const std::vector<ScheduledUnit>& units() const { return units_; }
  const ScheduleOptions& options() const { return options_; }

  // Makes the next step, or another piece of a training. If a schedule refuses
  // one of its events, a Reset and the next step have to follow.
  Events Step();

  // Makes a step of any events, whether they make sense or not.
  Events Nonsense();

 private:
  enum class Mode { kGrad, kNoGrad, kRecompute };

  // One use of a unit in a forward, and what becomes of it in backward.
  struct Call {
    int unit;
    bool needs_grad;  // its output needs grad
    bool reached;     // the gradient reaches it
    bool completed;   // its parameters get their gradients
    bool recomputed;
    bool backward_at_once;  // inside the forward
    std::vector<Call> calls;
  };

  void AddUnit(int parent);
  int AnyUnit();
  Call MakeCall(int unit);
  void AppendForward(const Call& call, Mode mode, Events& events);
  void AppendPostBackward(int unit, Events& events);
  void AppendBackwardOf(const Call& call, Events& events);
  void AppendEndOfBackward(Events& events);
  void AppendBackward(const Call& root, Events& events);
  Event Request();
  void InsertRequests(Events& events);

  Choices& choices_;
  std::vector<ScheduledUnit> units_;
  std::vector<bool> frozen_;
  ScheduleOptions options_;
  int percent_synchronized_;
  bool synchronizes_ = true;  // the backward that is being made
};

RandomModel::RandomModel(Choices* choices) : choices_(*choices) {
  const int count = choices_.Between(1, kMaxUnits);
  for (int i = 0; i < count; ++i) {
    AddUnit(i == 0 ? -1 : choices_.Between(0, i - 1));
  }
  options_.forward_prefetch = choices_.Chance(75);
  options_.backward_prefetch = choices_.Chance(75);
  options_.max_gathered_units = choices_.Between(0, 3);
  options_.max_reduce_buffers = choices_.Between(1, 3);
  options_.step_in_backward = choices_.Chance(25);
  percent_synchronized_ = 100 - choices_.Between(0, 2) * 30;
  if (choices_.Chance(30)) {
    for (ScheduledUnit& unit : units_) {
      unit.shares_memory = choices_.Chance(80);
      unit.rests_elsewhere = !unit.shares_memory && choices_.Chance(50);
      unit.keeps_part = unit.keeps_part && !unit.shares_memory;
    }
  }
}

void RandomModel::AddUnit(int parent) {
  ScheduledUnit unit{absl::StrCat("unit", units_.size()), parent};
  const bool is_root = units_.empty();
  unit.reshard_after_forward = !choices_.Chance(is_root ? 80 : 30);
  unit.keep_until_sync =
      !unit.reshard_after_forward && choices_.Chance(is_root ? 25 : 50);
  unit.keeps_part = unit.reshard_after_forward && choices_.Chance(25);
  unit.replicated = choices_.Chance(30);
  unit.sharded = !unit.replicated || choices_.Chance(60);
  units_.push_back(std::move(unit));
  frozen_.push_back(choices_.Chance(20));
}

int RandomModel::AnyUnit() {
  return choices_.Between(0, static_cast<int>(units_.size()) - 1);
}

Events RandomModel::Step() {
  Events events;
  const int kind = choices_.Between(0, 11);
  synchronizes_ = choices_.Chance(percent_synchronized_);
  const Call first = MakeCall(0);
  switch (kind) {
    case 0:
      AppendForward(first, Mode::kNoGrad, events);
      break;
    case 1:
      AppendForward(MakeCall(AnyUnit()), Mode::kNoGrad, events);
      break;
    case 2:
      AppendForward(first, Mode::kGrad, events);
      break;
    case 3: {
      const Call second = MakeCall(0);
      AppendForward(first, Mode::kGrad, events);
      AppendForward(second, Mode::kGrad, events);
      AppendBackward(second, events);
      AppendBackward(first, events);
      break;
    }
    case 4:
      AppendForward(first, Mode::kGrad, events);
      AppendBackward(first, events);
      events.resize(choices_.Between(0, static_cast<int>(events.size())),
                    EndOfBackward());
      events.push_back(Reset());
      break;
    case 5:
      for (int i = choices_.Between(1, 6); i > 0; --i) {
        events.push_back(Request());
      }
      break;
    default:
      AppendForward(first, Mode::kGrad, events);
      AppendBackward(first, events);
      break;
  }
  InsertRequests(events);
  return events;
}

RandomModel::Call RandomModel::MakeCall(int unit) {
  Call call{unit,
            !choices_.Chance(8),
            !choices_.Chance(8),
            !choices_.Chance(8),
            choices_.Chance(15),
            choices_.Chance(3),
            {}};
  std::vector<int> children;
  for (int i = unit + 1; i < static_cast<int>(units_.size()); ++i) {
    if (units_[i].parent != unit || choices_.Chance(6)) continue;
    children.push_back(i);
    if (choices_.Chance(10)) children.push_back(i);
  }
  if (choices_.Chance(15)) {
    for (size_t i = 1; i < children.size(); ++i) {
      std::swap(children[i],
                children[choices_.Between(0, static_cast<int>(i))]);
    }
  }
  for (int child : children) call.calls.push_back(MakeCall(child));
  return call;
}

void RandomModel::AppendForward(const Call& call, Mode mode, Events& events) {
  // A region that will be recomputed first runs without grad.
  const bool records =
      mode != Mode::kNoGrad && (mode == Mode::kRecompute || !call.recomputed);
  Event pre{EventKind::kPreForward, call.unit};
  pre.records_graph = records;
  pre.recomputes = mode == Mode::kRecompute;
  events.push_back(pre);
  for (const Call& inner : call.calls) {
    AppendForward(inner, mode == Mode::kGrad && !records ? Mode::kNoGrad : mode,
                  events);
    if (mode == Mode::kGrad && records && inner.backward_at_once) {
      AppendBackwardOf(inner, events);
      // A parameter of the surrounding unit may be part of that graph.
      if (choices_.Chance(50)) AppendPostBackward(call.unit, events);
      AppendEndOfBackward(events);
    }
  }
  Event post{EventKind::kPostForward, call.unit};
  post.expects_backward = records && call.needs_grad;
  post.recomputes = mode == Mode::kRecompute;
  events.push_back(post);
}

void RandomModel::AppendPostBackward(int unit, Events& events) {
  Event event{EventKind::kPostBackward, unit};
  event.reduces = !frozen_[unit];
  event.synchronizes = synchronizes_;
  events.push_back(event);
}

// Goes last in, first out, as autograd orders the graph.
void RandomModel::AppendBackwardOf(const Call& call, Events& events) {
  const bool runs = call.needs_grad && call.reached;
  if (runs && call.recomputed) AppendForward(call, Mode::kRecompute, events);
  if (runs) events.push_back(PreBackward(call.unit));
  for (auto inner = call.calls.rbegin(); inner != call.calls.rend(); ++inner) {
    if (inner->backward_at_once) continue;
    if (runs || choices_.Chance(30)) AppendBackwardOf(*inner, events);
  }
  if (runs ? call.completed : choices_.Chance(30)) {
    AppendPostBackward(call.unit, events);
  }
}

void RandomModel::AppendEndOfBackward(Events& events) {
  Event event{EventKind::kEndOfBackward};
  event.synchronizes = synchronizes_;
  events.push_back(event);
}

void RandomModel::AppendBackward(const Call& root, Events& events) {
  AppendBackwardOf(root, events);
  AppendEndOfBackward(events);
}

Event RandomModel::Request() {
  constexpr EventKind kKinds[] = {EventKind::kUnshard, EventKind::kWaitUnshard,
                                  EventKind::kReshard, EventKind::kRelease,
                                  EventKind::kSetReduction};
  const EventKind kind = kKinds[choices_.Between(0, 4)];
  Event event{kind, kind == EventKind::kRelease ? 0 : AnyUnit()};
  if (kind == EventKind::kSetReduction) {
    event.synchronizes = choices_.Chance(60);
    event.all_reduces = choices_.Chance(50);
  }
  return event;
}

void RandomModel::InsertRequests(Events& events) {
  if (!choices_.Chance(25)) return;
  for (int i = choices_.Between(1, 3); i > 0; --i) {
    const int at = choices_.Between(0, static_cast<int>(events.size()));
    events.insert(events.begin() + at, Request());
  }
}

// Leaves out only what a model never does: a forward that begins inside
// backward without recomputing or ends as another one, and a backward that ends
// inside a recomputation or synchronizes in part.
Events RandomModel::Nonsense() {
  Events events;
  std::vector<Event> forwards;  // under way
  bool in_backward = false;
  bool synchronizes = choices_.Chance(60);
  for (int i = choices_.Between(1, kMaxNonsense); i > 0; --i) {
    Event event{kNonsense[choices_.Between(0, kNonsenseKinds - 1)], AnyUnit()};
    event.reduces = choices_.Chance(70);
    event.synchronizes = synchronizes;
    switch (event.kind) {
      case EventKind::kPreForward:
        event.records_graph = choices_.Chance(60);
        event.recomputes = in_backward || choices_.Chance(10);
        in_backward |= event.recomputes;
        // Other forwards are refused.
        if (event.unit == 0 || !forwards.empty() || event.recomputes ||
            !event.records_graph) {
          forwards.push_back(event);
        }
        break;
      case EventKind::kPostForward:
        event.expects_backward = choices_.Chance(70);
        if (forwards.empty()) break;
        if (choices_.Chance(80)) event.unit = forwards.back().unit;
        if (event.unit != forwards.back().unit) break;
        event.recomputes = forwards.back().recomputes;
        forwards.pop_back();
        break;
      case EventKind::kPreBackward:
      case EventKind::kPostBackward:
        in_backward = true;
        break;
      case EventKind::kReset:
        forwards.clear();
        [[fallthrough]];
      case EventKind::kEndOfBackward:
        if (!forwards.empty() && forwards.back().recomputes) continue;
        in_backward = false;
        synchronizes = choices_.Chance(60);
        break;
      case EventKind::kSetReduction:
        event.synchronizes = choices_.Chance(60);
        event.all_reduces = choices_.Chance(50);
        break;
      default:
        break;
    }
    events.push_back(event);
  }
  events.push_back(Reset());
  return events;
}

bool IsForBetweenSteps(const Event& event) {
  return event.kind == EventKind::kRelease ||
         event.kind == EventKind::kSetReduction;
}

bool IsRequest(const Event& event) {
  return event.kind == EventKind::kUnshard ||
         event.kind == EventKind::kWaitUnshard ||
         event.kind == EventKind::kReshard || IsForBetweenSteps(event);
}

bool IsBackward(const Event& event) {
  return event.recomputes || event.kind == EventKind::kPreBackward ||
         event.kind == EventKind::kPostBackward ||
         event.kind == EventKind::kEndOfBackward;
}

// Returns before which events of a step a user may write shards: up to its
// first forward, and after its last backward.
std::vector<bool> MayWriteBefore(const Events& step) {
  const auto first = std::find_if(
      step.begin(), step.end(),
      [](const Event& event) { return event.kind == EventKind::kPreForward; });
  const auto last = std::find_if(step.rbegin(), step.rend(), IsBackward);
  std::vector<bool> may(step.size());
  for (size_t i = 0; i < step.size(); ++i) {
    const auto event = step.begin() + static_cast<int64_t>(i);
    may[i] = event <= first || event >= last.base();
  }
  return may;
}

class Run {
 public:
  explicit Run(Choices* choices)
      : choices_(*choices),
        model_(choices),
        writes_(choices->Chance(70)),
        schedule_(model_.units(), model_.options()),
        other_rank_(model_.units(), model_.options()),
        checker_(model_.units(), model_.options()) {}

  ScheduleRun Steps(int steps) {
    for (int i = 0; i < steps && result_.error.empty(); ++i) {
      history_.clear();
      Step();
      if (!result_.error.empty()) {
        result_.error = absl::StrCat("step ", i, ": ", result_.error, history_);
      }
    }
    return result_;
  }

 private:
  void Step() {
    // Nonsense may run backward through graphs that are older than a write.
    const bool nonsense = choices_.Chance(15);
    if (nonsense && writes_) Report(Reset());
    const Events events = nonsense ? model_.Nonsense() : model_.Step();
    const std::vector<bool> may_write = MayWriteBefore(events);
    const bool trains = std::any_of(events.begin(), events.end(), IsBackward);
    for (size_t i = 0; i < events.size() && result_.error.empty(); ++i) {
      if (IsForBetweenSteps(events[i]) &&
          (schedule_.in_forward() || schedule_.in_backward())) {
        continue;
      }
      if (writes_ && !nonsense && may_write[i]) UserActs(events[i].unit);
      // A refused request has no effect; other failures give up the iteration.
      const bool refused = (trains || nonsense || events[i].records_graph) &&
                           IsRefusedAbove(events[i]);
      const bool goes_on =
          refused ? nonsense
                  : Report(events[i]) || nonsense || IsRequest(events[i]);
      if (goes_on) continue;
      Report(Reset());
      return;
    }
  }

  void UserActs(int unit) {
    if (schedule_.MayLook(unit) && choices_.Chance(50)) {
      absl::StrAppend(&history_, "\n  look at ", unit);
      schedule_.Look(unit);
    }
    if (schedule_.MayWrite() && choices_.Chance(50)) {
      absl::StrAppend(&history_, "\n  write");
      schedule_.Write();
    }
  }

  // ShardedModel refuses a forward of old values that has a backward to come.
  bool IsRefusedAbove(const Event& event) const {
    return event.kind == EventKind::kPreForward && !event.recomputes &&
           schedule_.IsHeldForUser(event.unit) &&
           schedule_.IsOlderThanShards(event.unit);
  }

  // Returns false if the event is refused.
  bool Report(const Event& event) {
    ++result_.num_events;
    const absl::StatusOr<Actions> actions = schedule_.Next(event);
    Record(event, actions);
    const absl::StatusOr<Actions> other = other_rank_.Next(event);
    if (absl::IsInternal(actions.status())) {
      result_.error = std::string(actions.status().message());
    } else if (other.ok() != actions.ok() ||
               (actions.ok() && *other != *actions)) {
      result_.error = absl::StrCat(ToString(event), ": ranks disagree");
    } else {
      result_.error = checker_.Check(event, actions);
    }
    return actions.ok();
  }

  void Record(const Event& event, const absl::StatusOr<Actions>& actions) {
    absl::StrAppend(&history_, "\n  ", ToString(event), ":");
    if (!actions.ok()) absl::StrAppend(&history_, " refused");
    for (const Action& action : actions.ok() ? *actions : Actions()) {
      absl::StrAppend(&history_, " ", ToString(action));
    }
  }

  Choices& choices_;
  RandomModel model_;
  const bool writes_;
  WatchedSchedule schedule_;
  Schedule other_rank_;
  ScheduleChecker checker_;
  ScheduleRun result_;
  std::string history_;
};

}  // namespace

ScheduleRun RunSchedule(Choices* choices, int steps) {
  return Run(choices).Steps(steps);
}

}  // namespace fsdp::testing
