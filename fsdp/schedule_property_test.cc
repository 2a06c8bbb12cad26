// Random models under random steps, against a model of what may happen.
#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "fsdp/schedule.h"
#include "fsdp/testing/schedule_trace.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::fsdp::testing::EndOfBackward;
using ::fsdp::testing::Events;
using ::fsdp::testing::PreBackward;
using ::fsdp::testing::Reset;

constexpr int kMaxUnits = 12;
constexpr int kStepsPerModel = 8;

// One use of a unit in a forward, and what becomes of it in backward.
struct Call {
  int unit;
  bool needs_grad;  // its output
  bool reached;     // by the gradient
  bool completed;   // its parameters get their gradients
  bool recomputed;
  bool backward_at_once;  // inside the forward
  std::vector<Call> calls;
};

class RandomModel {
 public:
  explicit RandomModel(int seed) : random_(seed) {
    const int count = Between(1, kMaxUnits);
    for (int i = 0; i < count; ++i) {
      const int parent = i == 0 ? -1 : Between(0, i - 1);
      units_.push_back({absl::StrCat("unit", i), parent, !Chance(i ? 20 : 80)});
      frozen_.push_back(Chance(20));
    }
    options_.forward_prefetch = Chance(75);
    options_.backward_prefetch = Chance(75);
    options_.max_gathered_units = Between(0, 3);
    options_.max_reduce_buffers = Between(1, 3);
  }

  const std::vector<ScheduledUnit>& units() const { return units_; }
  const ScheduleOptions& options() const { return options_; }

  Events RandomStep() {
    Events events;
    const int kind = Between(0, 9);
    const Call first = MakeCall(0);
    const Call second = MakeCall(0);
    if (kind == 0) {
      AppendForward(first, Mode::kNoGrad, events);
    } else if (kind == 1) {
      AppendForward(MakeCall(Between(0, units_.size() - 1)), Mode::kNoGrad,
                    events);
    } else if (kind == 2) {
      AppendForward(first, Mode::kGrad, events);
    } else if (kind == 3) {
      AppendForward(first, Mode::kGrad, events);
      AppendForward(second, Mode::kGrad, events);
      AppendBackward(second, events);
      AppendBackward(first, events);
    } else {
      AppendForward(first, Mode::kGrad, events);
      AppendBackward(first, events);
    }
    if (kind == 4) {
      events.resize(Between(0, events.size()), EndOfBackward());
      events.push_back(Reset());
    }
    return events;
  }

 private:
  enum class Mode { kGrad, kNoGrad, kRecompute };

  int Between(int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random_);
  }
  bool Chance(int percent) { return Between(1, 100) <= percent; }

  Call MakeCall(int unit) {
    Call call{unit,       Chance(92), Chance(92), Chance(92),
              Chance(15), Chance(3),  {}};
    std::vector<int> children;
    for (int i = unit + 1; i < static_cast<int>(units_.size()); ++i) {
      if (units_[i].parent != unit || Chance(6)) continue;
      children.push_back(i);
      if (Chance(10)) children.push_back(i);
    }
    if (Chance(15)) std::shuffle(children.begin(), children.end(), random_);
    for (int child : children) call.calls.push_back(MakeCall(child));
    return call;
  }

  void AppendForward(const Call& call, Mode mode, Events& events) {
    Event pre{EventKind::kPreForward, call.unit};
    pre.records_graph = mode != Mode::kNoGrad;
    pre.recomputes = mode == Mode::kRecompute;
    events.push_back(pre);
    for (const Call& inner : call.calls) {
      AppendForward(inner, mode, events);
      if (mode == Mode::kGrad && inner.backward_at_once) {
        AppendBackwardOf(inner, events);
        // A parameter of the surrounding unit may be part of that graph.
        if (Chance(50)) AppendPostBackward(call.unit, events);
        events.push_back(EndOfBackward());
      }
    }
    Event post{EventKind::kPostForward, call.unit};
    post.expects_backward = mode != Mode::kNoGrad && call.needs_grad;
    post.recomputes = mode == Mode::kRecompute;
    events.push_back(post);
  }

  void AppendPostBackward(int unit, Events& events) {
    Event event{EventKind::kPostBackward, unit};
    event.reduces = !frozen_[unit];
    events.push_back(event);
  }

  // Last in, first out: as autograd orders what the forward has built.
  void AppendBackwardOf(const Call& call, Events& events) {
    const bool runs = call.needs_grad && call.reached;
    if (runs && call.recomputed) AppendForward(call, Mode::kRecompute, events);
    if (runs) events.push_back(PreBackward(call.unit));
    for (auto inner = call.calls.rbegin(); inner != call.calls.rend();
         ++inner) {
      if (inner->backward_at_once) continue;
      if (runs || Chance(30)) AppendBackwardOf(*inner, events);
    }
    if (runs ? call.completed : Chance(30)) {
      AppendPostBackward(call.unit, events);
    }
  }

  void AppendBackward(const Call& root, Events& events) {
    AppendBackwardOf(root, events);
    events.push_back(EndOfBackward());
  }

  std::mt19937 random_;
  std::vector<ScheduledUnit> units_;
  std::vector<bool> frozen_;
  ScheduleOptions options_;
};

// What a runtime and a model that carry the actions out would hold.
class Checker {
 public:
  explicit Checker(const RandomModel& model)
      : specs_(model.units()),
        options_(model.options()),
        units_(specs_.size()) {}

  // What is wrong with `actions` as the answer to `event`; "" for nothing.
  std::string Check(const Event& event, const Actions& actions) {
    BeforeActions(event);
    int fills = 0;
    int reduces = 0;
    for (const Action& action : actions) {
      const std::string error = Apply(event, action);
      if (!error.empty()) {
        return absl::StrCat(ToString(action), " of ", ToString(event), ": ",
                            error);
      }
      fills += action.kind == ActionKind::kFillReduceBuffer;
      reduces += action.kind == ActionKind::kReduce;
    }
    if (fills != event.reduces || reduces != event.reduces) {
      return absl::StrCat(ToString(event), ": wrong number of reductions");
    }
    AfterActions(event);
    const std::string error = CheckState(event);
    return error.empty() ? "" : absl::StrCat(ToString(event), ": ", error);
  }

 private:
  enum class Memory { kSharded, kInFlight, kGathered };
  struct Unit {
    Memory memory = Memory::kSharded;
    bool guessed = false;   // gathered for no event so far
    int forwards = 0;       // under way
    int backwards = 0;      // under way
    bool may_stay = false;  // for a backward that is to come

    bool in_use() const { return forwards + backwards > 0; }
  };

  // What has ended before the actions are carried out.
  void BeforeActions(const Event& event) {
    Unit& unit = units_[event.unit];
    switch (event.kind) {
      case EventKind::kPreForward:
        if (event.recomputes) {
          in_backward_ = true;
        } else if (depth_ == 0) {
          for (Unit& each : units_) each.may_stay = false;
        }
        break;
      case EventKind::kPostForward:
        if (event.expects_backward &&
            (event.recomputes || !specs_[event.unit].reshard_after_forward)) {
          unit.may_stay = true;
        }
        --unit.forwards;
        --depth_;
        break;
      case EventKind::kPreBackward:
        in_backward_ = true;
        break;
      case EventKind::kPostBackward:
        in_backward_ = true;
        unit.backwards = std::max(0, unit.backwards - 1);
        unit.may_stay = false;
        break;
      case EventKind::kReset:
        depth_ = 0;
        reductions_.clear();
        for (Unit& each : units_) each.forwards = 0;
        [[fallthrough]];
      case EventKind::kEndOfBackward:
        in_backward_ = false;
        for (Unit& each : units_) each.backwards = each.may_stay = 0;
        break;
      default:
        break;
    }
  }

  // What begins once they have been.
  void AfterActions(const Event& event) {
    Unit& unit = units_[event.unit];
    if (event.kind == EventKind::kPreForward) {
      ++unit.forwards;
      ++depth_;
      unit.guessed = false;
    } else if (event.kind == EventKind::kPreBackward) {
      ++unit.backwards;
      unit.guessed = false;
    }
  }

  std::string Apply(const Event& event, const Action& action) {
    Unit& unit = units_[action.unit];
    switch (action.kind) {
      case ActionKind::kGather:
        if (unit.memory != Memory::kSharded) return "gathered already";
        unit.memory = Memory::kInFlight;
        unit.guessed = action.unit != event.unit;
        return unit.guessed ? CheckGuess(event) : "";
      case ActionKind::kWaitGather:
        if (unit.memory != Memory::kInFlight) return "no gather in flight";
        unit.memory = Memory::kGathered;
        return "";
      case ActionKind::kFree:
        if (unit.memory != Memory::kGathered) return "not gathered";
        if (unit.in_use()) return "still in use";
        unit.memory = Memory::kSharded;
        unit.guessed = false;
        return "";
      case ActionKind::kFillReduceBuffer:
        if (action.unit != event.unit) return "of another unit";
        filled_ = action.unit;
        if (static_cast<int>(reductions_.size()) >=
            options_.max_reduce_buffers) {
          return "too many reduce buffers";
        }
        return "";
      case ActionKind::kReduce:
        if (filled_ != action.unit) return "nothing to reduce";
        filled_ = -1;
        reductions_.push_back(action.unit);
        return "";
      case ActionKind::kWaitReduce:
        if (reductions_.empty() || reductions_.front() != action.unit) {
          return "not the oldest reduction";
        }
        reductions_.pop_front();
        return "";
      default:
        return "unexpected action";
    }
  }

  // A gather that no event has asked for.
  std::string CheckGuess(const Event& event) const {
    const bool forward = event.kind == EventKind::kPreForward;
    if (!forward && event.kind != EventKind::kPreBackward) {
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

  std::string CheckState(const Event& event) const {
    int guesses = 0;
    for (size_t i = 0; i < units_.size(); ++i) {
      const Unit& unit = units_[i];
      if (unit.in_use() && unit.memory != Memory::kGathered) {
        return absl::StrCat(i, " computes but is not gathered");
      }
      if (unit.memory == Memory::kSharded || unit.in_use()) continue;
      guesses += unit.guessed;
      if (!unit.guessed && !unit.may_stay) {
        return absl::StrCat(i, " stays gathered for nothing");
      }
    }
    if (guesses > 1) return "more than one guess in flight";
    const bool ends = event.kind == EventKind::kEndOfBackward ||
                      event.kind == EventKind::kReset;
    const bool left_forward =
        event.kind == EventKind::kPostForward && depth_ == 0 && !in_backward_;
    if ((ends || left_forward) && guesses > 0) return "a guess is left";
    if (ends && !reductions_.empty()) return "a reduction is left";
    return "";
  }

  const std::vector<ScheduledUnit> specs_;
  const ScheduleOptions options_;
  std::vector<Unit> units_;
  int depth_ = 0;  // of forwards
  bool in_backward_ = false;
  int filled_ = -1;
  std::deque<int> reductions_;
};

void ExpectValidSteps(int seed) {
  RandomModel model(seed);
  Schedule schedule(model.units(), model.options());
  Schedule other_rank(model.units(), model.options());
  Checker checker(model);
  for (int step = 0; step < kStepsPerModel; ++step) {
    for (const Event& event : model.RandomStep()) {
      const absl::StatusOr<Actions> actions = schedule.Next(event);
      ASSERT_TRUE(actions.ok()) << ToString(event) << actions.status();
      ASSERT_EQ(checker.Check(event, *actions), "") << "step " << step;
      ASSERT_EQ(*other_rank.Next(event), *actions) << "ranks disagree";
    }
  }
}

TEST(SchedulePropertyTest, RandomModelsUnderRandomStepsKeepTheInvariants) {
  constexpr int kSeeds = 5000;
  for (int seed = 0; seed < kSeeds; ++seed) {
    ExpectValidSteps(seed);
    ASSERT_FALSE(HasFatalFailure()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace fsdp
