#include "fsdp/schedule/testing/random_steps.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "fsdp/schedule/schedule.h"

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

}  // namespace

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

}  // namespace fsdp::testing
