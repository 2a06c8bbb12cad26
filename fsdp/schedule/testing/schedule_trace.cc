#include "fsdp/schedule/testing/schedule_trace.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"

namespace fsdp::testing {

WatchedSchedule::WatchedSchedule(std::vector<ScheduledUnit> units,
                                 ScheduleOptions options)
    : Schedule(units, options) {
  models_.emplace_back(units, options, Sharing::kInPlace);
  if (std::any_of(units.begin(), units.end(), [](const ScheduledUnit& unit) {
        return unit.shares_memory;
      })) {
    models_.emplace_back(units, options, Sharing::kCommonCopy);
  }
}

absl::StatusOr<Actions> WatchedSchedule::Next(const Event& event) {
  absl::StatusOr<Actions> actions = Schedule::Next(event);
  if (actions.ok()) {
    for (MemoryModel& model : models_) model.Happens(event, *actions);
  }
  const absl::Status status = Check();
  return status.ok() ? std::move(actions) : status;
}

void WatchedSchedule::SetKept(int unit, bool whole_gradients, bool sums) {
  Schedule::SetKept(unit, whole_gradients, sums);
  for (MemoryModel& model : models_) {
    if (!whole_gradients) model.DropWholeGradients(unit);
    if (!sums) model.DropSums(unit);
  }
}

void WatchedSchedule::Write() {
  for (MemoryModel& model : models_) model.Write();
}

void WatchedSchedule::Look(int unit) {
  for (MemoryModel& model : models_) model.Look(unit);
}

bool WatchedSchedule::HoldsUnits() const {
  for (size_t i = 0; i < this->units().size(); ++i) {
    if (IsHeldForUser(static_cast<int>(i))) return true;
  }
  return false;
}

absl::Status WatchedSchedule::Check() const {
  for (const MemoryModel& model : models_) {
    if (!model.violation().empty()) {
      return absl::InternalError(
          absl::StrCat(&model == &models_.front() ? "" : "with a common copy: ",
                       model.violation()));
    }
  }
  return absl::OkStatus();
}

namespace {

// The words in front of an event and what they change.
struct Word {
  absl::string_view text;
  bool (*is_true)(const Event& event);
  void (*set)(Event& event);
};
constexpr Word kWords[] = {
    {"NoGrad ",
     [](const Event& e) {
       return (e.kind == EventKind::kPreForward && !e.records_graph) ||
              (e.kind == EventKind::kPostForward && !e.expects_backward);
     },
     [](Event& e) { e.records_graph = e.expects_backward = false; }},
    {"Recompute ", [](const Event& e) { return e.recomputes; },
     [](Event& e) { e.recomputes = true; }},
    {"Frozen ",
     [](const Event& e) {
       return e.kind == EventKind::kPostBackward && !e.reduces;
     },
     [](Event& e) { e.reduces = false; }},
    {"Unsync ",
     [](const Event& e) {
       return e.kind != EventKind::kPreBackward && !e.synchronizes;
     },
     [](Event& e) { e.synchronizes = false; }},
    {"Local ", [](const Event& e) { return !e.all_reduces; },
     [](Event& e) { e.all_reduces = false; }}};

std::string TextOf(const Event& event) {
  std::string text;
  for (const Word& word : kWords) {
    if (word.is_true(event)) absl::StrAppend(&text, word.text);
  }
  return absl::StrCat(text, ToString(event));
}

}  // namespace

Event EventOf(absl::string_view text) {
  Event event{EventKind::kPreForward};
  event.records_graph = event.expects_backward = event.reduces = true;
  for (const Word& word : kWords) {
    if (absl::ConsumePrefix(&text, word.text)) word.set(event);
  }
  const std::vector<std::string> parts =
      absl::StrSplit(text, absl::ByAnyChar("()"));
  while (Name(event.kind) != parts[0]) {
    FSDP_CHECK(event.kind != EventKind::kRelease);
    event.kind = static_cast<EventKind>(static_cast<int>(event.kind) + 1);
  }
  if (parts.size() > 1) FSDP_CHECK(absl::SimpleAtoi(parts[1], &event.unit));
  return event;
}

Event PreForward(int unit) {
  Event event{EventKind::kPreForward, unit};
  event.records_graph = true;
  return event;
}

Event PostForward(int unit) {
  Event event{EventKind::kPostForward, unit};
  event.expects_backward = true;
  return event;
}

Event PreBackward(int unit) { return {EventKind::kPreBackward, unit}; }

Event PostBackward(int unit) {
  Event event{EventKind::kPostBackward, unit};
  event.reduces = true;
  return event;
}

Event PostBackwardFrozen(int unit) { return {EventKind::kPostBackward, unit}; }

Event EndOfBackward() { return {EventKind::kEndOfBackward}; }

Event Reset() { return {EventKind::kReset}; }

std::vector<ScheduledUnit> UnitsWithParents(const std::vector<int>& parents) {
  std::vector<ScheduledUnit> units = {
      {"root", /*parent=*/-1, /*reshard_after_forward=*/false}};
  for (size_t i = 0; i < parents.size(); ++i) {
    units.push_back({absl::StrCat("unit", i + 1), parents[i]});
  }
  return units;
}

std::vector<ScheduledUnit> Layers(int layers) {
  return UnitsWithParents(std::vector<int>(layers, 0));
}

Events Forward(int layers) {
  Events events = {PreForward(0)};
  for (int unit = 1; unit <= layers; ++unit) {
    events.push_back(PreForward(unit));
    events.push_back(PostForward(unit));
  }
  events.push_back(PostForward(0));
  return events;
}

Events Backward(int layers) {
  Events events = {PreBackward(0)};
  for (int unit = layers; unit > 0; --unit) {
    events.push_back(PreBackward(unit));
    events.push_back(PostBackward(unit));
  }
  events.push_back(PostBackward(0));
  events.push_back(EndOfBackward());
  return events;
}

Events UnsynchronizedBackward(int layers) {
  Events events = Backward(layers);
  for (Event& event : events) event.synchronizes = false;
  return events;
}

ScheduleOptions NoPrefetch() {
  ScheduleOptions options;
  options.forward_prefetch = false;
  options.backward_prefetch = false;
  return options;
}

namespace {

// A write between a forward and its backward is a mistake of the user's, and so
// is one between Unshard() and a forward with grad.
void WriteBefore(const Event& event, WatchedSchedule& schedule) {
  switch (event.kind) {
    case EventKind::kPreForward:
    case EventKind::kUnshard:
    case EventKind::kWaitUnshard:
    case EventKind::kReshard:
    case EventKind::kRelease:
      if (!event.recomputes && schedule.MayWrite() && !schedule.HoldsUnits()) {
        schedule.Write();
      }
      break;
    default:
      break;
  }
}

}  // namespace

std::string Trace(WatchedSchedule& schedule, const Events& events) {
  std::string text = "\n";
  for (const Event& event : events) {
    absl::StrAppend(&text, TextOf(event), ":");
    WriteBefore(event, schedule);
    const absl::StatusOr<Actions> actions = schedule.Next(event);
    if (!actions.ok()) return absl::StrCat(text, actions.status().ToString());
    for (const Action& action : *actions) {
      absl::StrAppend(&text, " ", ToString(action));
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

::testing::AssertionResult Answers(WatchedSchedule& schedule,
                                   absl::string_view golden) {
  Events events;
  for (const absl::string_view line :
       absl::StrSplit(golden, '\n', absl::SkipEmpty())) {
    events.push_back(EventOf(line.substr(0, line.find(':'))));
  }
  const std::string actual = Trace(schedule, events);
  if (actual == golden) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "the answers are" << actual;
}

bool AllSharded(const WatchedSchedule& schedule, int num_units) {
  for (int unit = 0; unit < num_units; ++unit) {
    if (schedule.IsUnsharded(unit)) return false;
  }
  return true;
}

}  // namespace fsdp::testing
