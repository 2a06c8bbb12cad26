// What the model sees when ranks do something else than a Schedule has asked
// for: leave an action out, do it twice, or do it an event earlier.
#include "fsdp/schedule/testing/memory_model.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "fsdp/schedule/testing/schedule_trace.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

struct Setting {
  std::vector<ScheduledUnit> units;
  ScheduleOptions options;
  Sharing sharing = Sharing::kInPlace;
};

// An event and what ranks do, or one of the user's acts "Write", "Look(1)" and
// "Drop".
struct Line {
  std::string what;
  Actions actions;
};
using Lines = std::vector<Line>;

bool IsAct(const Line& line) {
  return line.what == "Write" || line.what == "Drop" ||
         absl::StartsWith(line.what, "Look");
}

// Reads "Gather(1) WaitGather(1)".
Actions ActionsIn(absl::string_view text) {
  Actions actions;
  for (const absl::string_view word :
       absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    const std::vector<std::string> parts =
        absl::StrSplit(word, absl::ByAnyChar("()"));
    Action action{ActionKind::kLoad, 0};
    while (Name(action.kind) != parts[0]) {
      action.kind = static_cast<ActionKind>(static_cast<int>(action.kind) + 1);
    }
    EXPECT_TRUE(absl::SimpleAtoi(parts[1], &action.unit));
    actions.push_back(action);
  }
  return actions;
}

Lines LinesIn(absl::string_view text) {
  Lines lines;
  for (const absl::string_view line :
       absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const size_t end = line.find(':');
    lines.push_back({std::string(line.substr(0, end)), {}});
    if (end != absl::string_view::npos) {
      lines.back().actions = ActionsIn(line.substr(end + 1));
    }
  }
  return lines;
}

std::string Violation(const Setting& setting, const Lines& lines) {
  MemoryModel model(setting.units, setting.options, setting.sharing);
  for (const Line& line : lines) {
    if (line.what == "Write") {
      EXPECT_TRUE(model.MayWrite());
      model.Write();
    } else if (line.what == "Look(1)") {
      if (model.MayLook(1)) model.Look(1);
    } else if (line.what == "Drop") {
      model.DropGradients();
    } else {
      model.Happens(EventOf(line.what), line.actions);
    }
    if (!model.violation().empty()) break;
  }
  return model.violation();
}

// Returns whether the model has nothing against it: it is started or awaited.
bool MayComeEarly(ActionKind kind) {
  switch (kind) {
    case ActionKind::kGather:
    case ActionKind::kGatherCopy:
    case ActionKind::kWaitGather:
    case ActionKind::kDropPart:
    case ActionKind::kReplicate:
    case ActionKind::kKeepSums:
    case ActionKind::kReplicateSums:
    case ActionKind::kWaitReduce:
      return true;
    default:
      return false;
  }
}

// Returns the changes of a Schedule's answers to `events` that the model does
// not see, wherever the same line is changed, after "\n". The answers
// themselves are right.
std::string Unseen(const Setting& setting, absl::string_view events) {
  Lines lines = LinesIn(events);
  Schedule schedule(setting.units, setting.options);
  for (Line& line : lines) {
    if (IsAct(line)) continue;
    const absl::StatusOr<Actions> actions = schedule.Next(EventOf(line.what));
    EXPECT_OK(actions.status()) << line.what;
    if (actions.ok()) line.actions = *actions;
  }
  EXPECT_EQ(Violation(setting, lines), "");
  std::set<std::string> seen;
  std::set<std::string> unseen;
  const auto note = [&](const Lines& changed, absl::string_view how,
                        const Line& line, const Action& action) {
    (Violation(setting, changed).empty() ? unseen : seen)
        .insert(absl::StrCat(line.what, ": ", ToString(action), " ", how));
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    for (size_t k = 0; k < lines[i].actions.size(); ++k) {
      const Action action = lines[i].actions[k];
      Lines changed = lines;
      Actions& own = changed[i].actions;
      own.insert(own.begin() + k, action);
      note(changed, "twice", lines[i], action);
      own.erase(own.begin() + k, own.begin() + k + 2);
      note(changed, "left out", lines[i], action);
      if (MayComeEarly(action.kind)) continue;
      size_t before = i;
      while (before > 0 && (before == i || IsAct(lines[before]))) --before;
      if (before == i || IsAct(lines[before])) continue;
      changed[before].actions.push_back(action);
      note(changed, "early", lines[i], action);
    }
  }
  std::string text = "\n";
  for (const std::string& change : unseen) {
    if (seen.count(change) == 0) absl::StrAppend(&text, change, "\n");
  }
  return text;
}

// These make a root and `layers` units in it, in private or in common memory.
Setting Private(int layers) { return {Layers(layers), {}}; }

Setting Shared(int layers, Sharing sharing = Sharing::kInPlace) {
  Setting setting{Layers(layers), {}, sharing};
  for (ScheduledUnit& unit : setting.units) unit.shares_memory = true;
  return setting;
}

Setting SteppingInBackward(Setting setting) {
  setting.options.step_in_backward = true;
  return setting;
}

std::string Twice(const std::string& events) { return events + events; }

constexpr char kStep[] = R"(
PreForward(0)
PreForward(1)
PostForward(1)
PostForward(0)
PreBackward(0)
PreBackward(1)
PostBackward(1)
PostBackward(0)
EndOfBackward
Write
Drop
)";

constexpr char kUnseen[] = R"(
PostForward(0): CloseShards(0) early
PostForward(0): CloseShards(0) left out
PostForward(0): CloseShards(0) twice
PreForward(0): OpenShards(0) early
PreForward(0): OpenShards(0) twice
)";

TEST(MemoryModelTest, AStepOfPrivateMemory) {
  EXPECT_EQ(Unseen(Private(1), Twice(kStep)), "\n");
}

TEST(MemoryModelTest, AStepOfSharedMemory) {
  EXPECT_EQ(Unseen(Shared(1), Twice(kStep)), R"(
PostForward(0): CloseShards(0) early
PostForward(0): CloseShards(0) left out
PostForward(0): CloseShards(0) twice
PreForward(0): OpenShards(0) twice
)");
  EXPECT_EQ(Unseen(Shared(1, Sharing::kCommonCopy), Twice(kStep)), kUnseen);
}

// A frozen unit has no reduction that would order the ranks.
TEST(MemoryModelTest, ABackwardOfAFrozenUnitInSharedMemory) {
  EXPECT_EQ(Unseen(Shared(0), Twice(R"(
PreForward(0)
PostForward(0)
PreBackward(0)
Frozen PostBackward(0)
EndOfBackward
Write
)")),
            R"(
EndOfBackward: CloseShards(0) early
EndOfBackward: CloseShards(0) twice
PostForward(0): CloseShards(0) early
PostForward(0): CloseShards(0) left out
PostForward(0): CloseShards(0) twice
PreForward(0): OpenShards(0) twice
)");
}

TEST(MemoryModelTest, AUnitUsedTwiceThatStepsInBackward) {
  const std::string step = R"(
PreForward(0)
PreForward(1)
PostForward(1)
PreForward(1)
PostForward(1)
PostForward(0)
PreBackward(0)
PreBackward(1)
PostBackward(1)
PreBackward(1)
PostBackward(1)
PostBackward(0)
EndOfBackward
)";
  EXPECT_EQ(Unseen(SteppingInBackward(Private(1)), Twice(step)), "\n");
  EXPECT_EQ(Unseen(SteppingInBackward(Shared(1)), Twice(step)), kUnseen);
}

// Unit 1 is not reached by the last backward.
TEST(MemoryModelTest, GradientsAndSumsThatAreKept) {
  Setting setting = Private(1);
  for (ScheduledUnit& unit : setting.units) unit.replicated = true;
  EXPECT_EQ(Unseen(setting, R"(
Local SetReduction(1)
PreForward(0)
PreForward(1)
PostForward(1)
PostForward(0)
PreBackward(0)
PreBackward(1)
PostBackward(1)
PostBackward(0)
EndOfBackward
PreForward(0)
PostForward(0)
PreBackward(0)
Unsync PostBackward(0)
Unsync EndOfBackward
SetReduction(1)
PreForward(0)
PostForward(0)
PreBackward(0)
PostBackward(0)
EndOfBackward
)"),
            R"(
PostForward(0): Free(1) left out
)");
}

TEST(MemoryModelTest, PartsAndRecomputations) {
  Setting setting = Private(1);
  setting.units[1].keeps_part = true;
  EXPECT_EQ(Unseen(setting, Twice(R"(
PreForward(0)
PreForward(1)
PostForward(1)
PostForward(0)
PreBackward(0)
Recompute PreForward(1)
Recompute PostForward(1)
PreBackward(1)
PostBackward(1)
PostBackward(0)
EndOfBackward
Write
)")),
            "\n");
}

TEST(MemoryModelTest, WhatTheUserAsksFor) {
  EXPECT_EQ(Unseen(Shared(1), R"(
Write
Unshard(1)
Write
WaitUnshard(1)
Look(1)
Reshard(1)
Write
Unshard(1)
PreForward(0)
PreForward(1)
PostForward(1)
NoGrad PostForward(0)
Write
)"),
            R"(
NoGrad PostForward(0): CloseShards(0) twice
NoGrad PostForward(0): Free(0) left out
PostForward(1): Free(1) left out
PreForward(0): OpenShards(0) early
PreForward(0): OpenShards(0) twice
Reshard(1): Free(1) early
)");
}

struct Wrong {
  Setting setting;
  const char* lines;
  const char* violation;  // a part of the text
};

TEST(MemoryModelTest, SaysWhatIsWrong) {
  Setting of_parts = Private(1);
  of_parts.units[1].keeps_part = true;
  Setting in_part = Shared(1);
  in_part.units[1].shares_memory = false;
  Setting of_one_buffer = Private(1);
  of_one_buffer.options.max_reduce_buffers = 1;
  const std::vector<Wrong> all = {
      {Private(1), R"(
Unshard(1): GatherCopy(1) WaitGather(1)
Write
PreForward(0): Gather(0) WaitGather(0)
PreForward(1):
PostForward(1): Free(1)
PostForward(0):
PreBackward(1): Gather(1) WaitGather(1)
)",
       "PreBackward(1): unit 1: the values of write 1 are read, and those of "
       "write 0 are due"},
      {Private(1), R"(
Unshard(1): GatherCopy(1)
Write
WaitUnshard(1): WaitGather(1)
Write
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Free(1) Gather(1) WaitGather(1)
)",
       "the values of write 2 are read, and those of write 0 are due"},
      {Private(1), R"(
Unshard(1): Gather(1)
Write
)",
       "write: unit 1: a shard is written while a gather reads it"},
      {of_parts, R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Shrink(1)
PreForward(1): Gather(1) DropPart(1)
)",
       "unit 1: its part is dropped while a gather reads it"},
      {in_part, R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0): Free(0)
Write
)",
       "write: unit 0: rank 0 writes its shard, which rank 2 may be reading"},
      {SteppingInBackward(Shared(0, Sharing::kCommonCopy)), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Reduce(0) WaitReduce(0) Step(0)
PreBackward(0):
Unshard(0): OpenShards(0)
Unshard(0): Free(0) Gather(0)
)",
       "unit 0: rank 0 writes its part of the common copy, which rank 2 may be "
       "reading"},
      {of_one_buffer, R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0)
)",
       "unit 0: it overwrites a reduce buffer that others may be reading"},
      {Private(0), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
Reset: WaitReduce(0)
)",
       "Reset: unit 0: no reduction of it can be finished"},
      {Private(0), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
Unsync PostBackward(0): Accumulate(0)
Unsync EndOfBackward:
Reset:
PreForward(0):
PostForward(0):
EndOfBackward:
)",
       "unit 0: its gradients are not those of the backwards so far"},
      {SteppingInBackward(Private(0)), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
Unsync PostBackward(0): Accumulate(0)
EndOfBackward: Step(0)
)",
       "unit 0: it steps without all gradients"}};
  for (const Wrong& wrong : all) {
    EXPECT_THAT(Violation(wrong.setting, LinesIn(wrong.lines)),
                HasSubstr(wrong.violation))
        << wrong.lines;
  }
}

}  // namespace
}  // namespace fsdp::testing
