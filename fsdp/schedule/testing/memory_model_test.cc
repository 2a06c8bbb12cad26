// Good traces in the form of golden ones, and changes that break one rule each.
#include "fsdp/schedule/testing/memory_model.h"

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/schedule_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StrEq;

struct Setting {
  std::vector<ScheduledUnit> units;
  ScheduleOptions options;
  Sharing sharing = Sharing::kInPlace;
};

// Returns the name in "Name(2)", and sets `unit`, or 0 if none is given.
std::string NameOf(absl::string_view call, int& unit) {
  const std::vector<std::string> parts = absl::StrSplit(call, '(');
  unit = 0;
  if (parts.size() > 1) {
    EXPECT_TRUE(absl::SimpleAtoi(absl::StripSuffix(parts[1], ")"), &unit));
  }
  return parts[0];
}

template <typename Kind>
Kind KindOf(absl::string_view name, Kind last) {
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    if (name == Name(static_cast<Kind>(i))) return static_cast<Kind>(i);
  }
  ADD_FAILURE() << "there is no " << name;
  return last;
}

// Reads an event such as "Unsync PostBackward(1)"; Recompute and Frozen are
// prefixes, too.
Event EventOf(absl::string_view text) {
  Event event{EventKind::kReset};
  event.reduces = !absl::ConsumePrefix(&text, "Frozen ");
  event.recomputes = absl::ConsumePrefix(&text, "Recompute ");
  event.synchronizes = !absl::ConsumePrefix(&text, "Unsync ");
  const std::string name = NameOf(text, event.unit);
  event.kind = KindOf(name, EventKind::kRelease);
  event.records_graph = true;
  event.expects_backward = true;
  return event;
}

Actions ActionsIn(absl::string_view text) {
  Actions actions;
  for (absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
    int unit = 0;
    const std::string name = NameOf(word, unit);
    actions.push_back({KindOf(name, ActionKind::kCloseShards), unit});
  }
  return actions;
}

// Returns the violation that a model finds in `trace`. Between events, "Write",
// "Look(1)" and "Drop" are acts of the user. "Unsync", "Recompute" and "Frozen"
// before an event describe it; without them it synchronizes, is no
// recomputation, and reduces.
std::string Violation(const Setting& setting, absl::string_view trace) {
  MemoryModel model(setting.units, setting.options, setting.sharing);
  for (absl::string_view line :
       absl::StrSplit(trace, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> halves = absl::StrSplit(line, ": ");
    const absl::string_view what = absl::StripSuffix(halves[0], ":");
    int unit = 0;
    const std::string name = NameOf(what, unit);
    if (name == "Write") {
      EXPECT_TRUE(model.MayWrite()) << trace;
      model.Write();
    } else if (name == "Look") {
      EXPECT_TRUE(model.MayLook(unit)) << trace;
      model.Look(unit);
    } else if (name == "Drop") {
      model.DropGradients();
    } else {
      model.Happens(EventOf(what),
                    halves.size() > 1 ? ActionsIn(halves[1]) : Actions());
    }
    if (!model.violation().empty()) break;
  }
  return model.violation();
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

// Replaces the first `from` after `after` in `trace` by `to`.
std::string With(std::string trace, absl::string_view from,
                 absl::string_view to, absl::string_view after = "") {
  const size_t at = trace.find(from, trace.find(after));
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? trace : trace.replace(at, from.size(), to);
}

// What is wrong with a good trace in which `to` replaces the first `from` after
// `after`.
struct Wrong {
  const char* from;
  const char* to;
  const char* violation;  // a part of the text
  const char* after = "";
};

void ExpectSeen(const Setting& setting, const std::string& trace,
                const std::vector<Wrong>& all) {
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  for (const Wrong& wrong : all) {
    EXPECT_THAT(
        Violation(setting, With(trace, wrong.from, wrong.to, wrong.after)),
        HasSubstr(wrong.violation))
        << wrong.from << " -> " << wrong.to;
  }
}

// A forward and a backward of two private units and acts of the user.
constexpr char kStep[] = R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0):
PreBackward(0): Gather(1)
PreBackward(1): WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
Write
Drop
)";

std::string Twice(const std::string& trace) { return trace + trace; }

TEST(MemoryModelTest, AUnitComputesWithoutBeingGathered) {
  ExpectSeen(
      Private(1), Twice(kStep),
      {{" WaitGather(1)", "", "PreForward(1): unit 1: it computes and is not"},
       {"PostForward(0):", "PostForward(0): Free(0)",
        "PreBackward(0): unit 0: it computes and is not"},
       // A child's end frees the unit around it.
       {"Free(1)", "Free(1) Free(0)",
        "PostForward(1): unit 0: it computes and is not"},
       {"Free(1)", "Free(1) Free(0)",
        "PostBackward(1): unit 0: it computes and is not", "PostBackward(1)"}});
}

TEST(MemoryModelTest, MemoryIsGivenBackOrOverwrittenWhileItIsInUse) {
  ExpectSeen(
      Private(1), Twice(kStep),
      {{"PreBackward(0): Gather(1)", "PreBackward(0): Gather(1) Free(1)",
        "unit 1: it is freed without being gathered"},
       {"Free(1)", "Shrink(1) Free(1)",
        "unit 1: it is freed without being gathered"},
       {"Gather(1)", "Gather(0)", "unit 0: it is gathered while it is there"},
       {"Gather(1)", "Gather(1) Gather(1)",
        "unit 1: it is gathered while it is there"},
       {"WaitGather(1)", "WaitGather(1) WaitGather(1)",
        "unit 1: no gather of it is in flight"}});
}

TEST(MemoryModelTest, AnInnerCallOfTheSameUnitDoesNotEndTheOuterOne) {
  EXPECT_THAT(Violation(Private(1), R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PreForward(1):
PostForward(1): Free(1)
)"),
              HasSubstr("unit 1: it computes and is not"));
}

TEST(MemoryModelTest, ARecomputationReadsParameters) {
  ExpectSeen(Private(1), R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0):
PreBackward(0):
Recompute PreForward(1): Gather(1) WaitGather(1)
Recompute PostForward(1):
PreBackward(1):
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0)
)",
             {{": Gather(1) WaitGather(1)", ":",
               "PreForward(1): unit 1: it computes and is not",
               "Recompute PreForward"}});
}

// The root is kept from one iteration to the next.
TEST(MemoryModelTest, AForwardReadsWhatWasThereBeforeTheLastWrite) {
  ExpectSeen(
      Private(0), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
Write
PreForward(0): Free(0) Gather(0) WaitGather(0)
)",
      {{"Free(0) Gather(0) WaitGather(0)", "",
        "unit 0: the values of write 0 are read, and those of write 1"}});
}

TEST(MemoryModelTest, AWriteComesWhileAGatherReads) {
  ExpectSeen(Private(1), R"(
Unshard(1): Gather(1) WaitGather(1)
Write
)",
             {{" WaitGather(1)", "",
               "unit 1: a shard is written while a gather reads it"}});
}

// Unit 1 is used twice and steps after the first of its reductions.
TEST(MemoryModelTest, BackwardReadsOtherValuesThanForward) {
  ExpectSeen(
      SteppingInBackward(Private(1)), R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1):
PreForward(1):
PostForward(1): Free(1)
PostForward(0):
PreBackward(0):
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1) WaitReduce(1)
PreBackward(1): Gather(1) WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1) WaitReduce(1) Step(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0) WaitReduce(0) Step(0)
EndOfBackward:
)",
      {{"WaitReduce(1)", "WaitReduce(1) Step(1)",
        "unit 1: the values of write 1 are read, and those of write 0"}});
}

// A forward without grad finds the values from the time of the request.
TEST(MemoryModelTest, AUnitThatWasAskedForHasTheValuesOfThen) {
  ExpectSeen(
      Private(1), R"(
Unshard(1): GatherCopy(1)
Write
WaitUnshard(1): WaitGather(1)
Write
PreForward(0): Gather(0) WaitGather(0)
PreForward(1):
)",
      {{"PreForward(1):", "PreForward(1): Free(1) Gather(1) WaitGather(1)",
        "the values of write 2 are read, and those of write 0 are due"}});
}

TEST(MemoryModelTest, AnIterationReadsTwoVersions) {
  EXPECT_THAT(Violation(Private(1), R"(
Unshard(1): GatherCopy(1) WaitGather(1)
Write
PreForward(0): Gather(0) WaitGather(0)
PreForward(1):
PostForward(1): Free(1)
PostForward(0):
PreBackward(1): Gather(1) WaitGather(1)
)"),
              HasSubstr("PreBackward(1): unit 1: the values of write 1 are "
                        "read, and those of write 0 are due"));
}

TEST(MemoryModelTest, PartsKeepTheValuesOfTheirForward) {
  Setting setting = Private(1);
  setting.units[1].keeps_part = true;
  ExpectSeen(
      setting, R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Shrink(1)
PostForward(0):
Write
PreForward(0): DropPart(1) Free(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
)",
      {{"DropPart(1) ", "", "PreForward(1): unit 1: the values of write 0"},
       {"Shrink(1)", "Free(1)", "there is no part of it"},
       {"Write", "Reset: Gather(1) DropPart(1)",
        "its part is dropped while a gather reads it"}});
}

// --- Memory in common -------------------------------------------------------

constexpr char kSharedStep[] = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0): CloseShards(0)
PreBackward(0): Gather(1)
PreBackward(1): WaitGather(1)
PostBackward(1): FillReduceBuffer(1) Free(1) Reduce(1)
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(1) WaitReduce(0) CloseShards(0)
Write
Drop
)";

TEST(SharedMemoryModelTest, AForwardBeginsBeforeAllHaveWritten) {
  ExpectSeen(Shared(1), Twice(kSharedStep),
             {{"OpenShards(0) ", "",
               "PreForward(0): unit 0: rank 0 reads what rank 1 may be writing",
               "Drop"}});
  // The copy is stale.
  ExpectSeen(
      Shared(1, Sharing::kCommonCopy), Twice(kSharedStep),
      {{"OpenShards(0) ", "",
        "PreForward(0): unit 0: the values of write 0 are read", "Drop"}});
}

// A frozen unit has no reduction that would order the ranks.
TEST(SharedMemoryModelTest, AWriteBeginsBeforeAllHaveRead) {
  ExpectSeen(Shared(0), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): CloseShards(0)
PreBackward(0):
Frozen PostBackward(0): Free(0)
EndOfBackward: CloseShards(0)
Write
)",
             {{" CloseShards(0)", "",
               "write: unit 0: rank 0 writes its shard, which rank 2 may be",
               "EndOfBackward"}});
  ExpectSeen(
      Shared(0), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): Free(0) CloseShards(0)
Write
)",
      {{"CloseShards(0)", "", "write: unit 0: rank 0 writes its shard"}});
}

TEST(SharedMemoryModelTest, TheFenceComesBeforeWhatItIsToOrder) {
  EXPECT_THAT(Violation(Shared(1),
                        Twice(With(With(kSharedStep, "OpenShards(0) ", ""),
                                   "Gather(1) WaitGather(1)",
                                   "OpenShards(0) Gather(1) WaitGather(1)"))),
              HasSubstr("PreForward(0): unit 0: rank 0 reads what rank 1"));
}

// The copy of a unit that has stepped is still what its graph needs.
TEST(SharedMemoryModelTest, APartOfTheCopyIsWrittenWhileOthersRead) {
  ExpectSeen(
      SteppingInBackward(Shared(0, Sharing::kCommonCopy)), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Reduce(0) WaitReduce(0) Step(0)
PreBackward(0):
)",
      {{"PreBackward(0):", "PreBackward(0):\nUnshard(0): Free(0) Gather(0)",
        "unit 0: it computes and is not gathered", "Step(0)"},
       {"PreBackward(0):",
        "PreBackward(0):\nUnshard(0): OpenShards(0)\n"
        "Unshard(0): Free(0) Gather(0)",
        "unit 0: rank 0 writes its part of the common copy", "Step(0)"}});
}

TEST(SharedMemoryModelTest, ACopyIsReadBeforeOthersHaveWrittenTheirParts) {
  ExpectSeen(Shared(0, Sharing::kCommonCopy),
             "PreForward(0): Gather(0) WaitGather(0)",
             {{" WaitGather(0)", "", "it computes and is not gathered"}});
}

TEST(SharedMemoryModelTest, ACopyDoesNotKeepOthersFromWritingTheirShards) {
  ExpectSeen(Shared(0, Sharing::kCommonCopy), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): Free(0)
Write
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
)",
             {});
}

// A unit steps while other ranks run its backward. Its reductions order that,
// but not what comes after them.
TEST(SharedMemoryModelTest, AUnitStepsWhileOthersReadIt) {
  ExpectSeen(SteppingInBackward(Shared(0)), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): CloseShards(0)
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)",
             {{"Free(0) Reduce(0)\nEndOfBackward:",
               "Reduce(0)\nPreBackward(0):\nPreBackward(0):",
               "unit 0: rank 0 writes its shard, which rank 2"}});
}

TEST(SharedMemoryModelTest, OthersCollectivesOrderNothing) {
  Setting setting = Shared(1);
  setting.units[1].shares_memory = false;
  const std::string trace = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Free(1)
PostForward(0): Free(0)
Write
)";
  EXPECT_THAT(Violation(setting, trace),
              HasSubstr("write: unit 0: rank 0 writes its shard"));
}

TEST(SharedMemoryModelTest, ALookReadsWhatWasThereAtUnshard) {
  ExpectSeen(
      Shared(1), R"(
Write
Unshard(1): OpenShards(0) Gather(1) WaitGather(1)
Look(1)
Reshard(1): Free(1) CloseShards(0)
Write
)",
      {{"OpenShards(0) ", "", "look: unit 1: rank 0 reads what rank 1 may be"},
       {" CloseShards(0)", "", "write: unit 1: rank 0 writes its shard"}});
}

TEST(SharedMemoryModelTest, ACopyIsOfTheValuesOfThenWhoeverWrites) {
  ExpectSeen(Shared(1), R"(
Write
Unshard(1): GatherCopy(1)
Write
WaitUnshard(1): WaitGather(1)
Look(1)
Reshard(1): Free(1)
)",
             {{"GatherCopy", "Gather", "look: unit 1: "}});
}

TEST(SharedMemoryModelTest, WhatAFailedIterationReadsDoesNotMatter) {
  ExpectSeen(Shared(0), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
Reset: Free(0)
Write
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
)",
             {});
}

// --- Gradients ---------------------------------------------------------------

TEST(GradientModelTest, GradientsOfAStepAreReducedOnce) {
  ExpectSeen(
      Private(1), Twice(kStep),
      {{"FillReduceBuffer(1) Free(1) Reduce(1)", "Free(1)",
        "PostBackward(1): unit 1: its gradients go nowhere"},
       {"WaitReduce(1) ", "",
        "EndOfBackward: unit 1: its reduction is in flight"},
       {" Reduce(1)", "", "EndOfBackward: unit 1: no reduction of it can be"},
       {"Reduce(1)", "Reduce(0)",
        "PostBackward(1): unit 0: no reduce buffer is filled"},
       {"WaitReduce(1)", "WaitReduce(1) WaitReduce(1)",
        "EndOfBackward: unit 1: no reduction of it can be"},
       {"FillReduceBuffer(0)", "FillReduceBuffer(1)",
        "PostBackward(0): unit 1: it has no gradients"}});
}

TEST(GradientModelTest, AReduceBufferIsFilledWhileOthersReadIt) {
  Setting setting = Private(1);
  setting.options.max_reduce_buffers = 1;
  ExpectSeen(setting,
             With(With(kStep, "FillReduceBuffer(0)",
                       "WaitReduce(1) FillReduceBuffer(0)"),
                  "EndOfBackward: WaitReduce(1)", "EndOfBackward:"),
             {{"WaitReduce(1) FillReduceBuffer(0)", "FillReduceBuffer(0)",
               "PostBackward(0): unit 0: it overwrites a reduce buffer"}});
}

constexpr char kAccumulation[] = R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
Unsync PostBackward(0): Accumulate(0) Free(0)
Unsync EndOfBackward:
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0)
)";

TEST(GradientModelTest, KeptGradientsAreReducedOnce) {
  ExpectSeen(Private(0), kAccumulation,
             {{"Accumulate(0) ", "", "unit 0: its gradients go nowhere"},
              {"Accumulate(0) ", "Accumulate(0) Accumulate(0) ",
               "unit 0: it has no gradients"}});
}

// Unit 1 is not reached again.
TEST(GradientModelTest, KeptGradientsAreLeftBehind) {
  ExpectSeen(Private(1), R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1):
PostForward(0):
PreBackward(1):
Unsync PostBackward(1): Accumulate(1) Free(1)
Unsync EndOfBackward: Free(0)
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: FillReduceBuffer(1) Reduce(1) WaitReduce(0) WaitReduce(1)
)",
             {{"FillReduceBuffer(1) Reduce(1) WaitReduce(0) WaitReduce(1)",
               "WaitReduce(0)",
               "EndOfBackward: unit 1: its gradients are not those of"}});
}

TEST(GradientModelTest, AGivenUpIterationMayLoseGradients) {
  ExpectSeen(Private(0), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
Reset:
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0)
)",
             {{"Reset:", "Reset: WaitReduce(0)",
               "Reset: unit 0: no reduction of it can be finished"}});
}

TEST(GradientModelTest, KeptGradientsOutliveAnIterationThatIsGivenUp) {
  ExpectSeen(Private(0),
             With(kAccumulation, "Unsync EndOfBackward:\n",
                  "Unsync EndOfBackward:\nReset:\n"),
             {{"PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)\n"
               "EndOfBackward: WaitReduce(0)",
               "Frozen PostBackward(0): Free(0)\nEndOfBackward:",
               "unit 0: its gradients are not those of the backwards"}});
}

TEST(GradientModelTest, ReplicasAreSummedBeforeTheGradientIsUsed) {
  Setting setting = Private(0);
  setting.units[0].replicated = true;
  const std::string trace = R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: Replicate(0) WaitReduce(0)
)";
  ExpectSeen(
      setting, trace,
      {{"Replicate(0) ", "", "unit 0: no reduction of it can be finished"}});
  EXPECT_THAT(Violation(Private(0), trace),
              HasSubstr("unit 0: there is nothing to replicate"));
}

TEST(GradientModelTest, AStepNeedsAllGradients) {
  ExpectSeen(
      SteppingInBackward(Private(1)), R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)",
      {{" Step(0)", "", "EndOfBackward: unit 0: it has not stepped"},
       {"WaitReduce(0) Step(0)", "Step(0) WaitReduce(0)",
        "EndOfBackward: unit 0: it steps before it is reduced"},
       {"Step(0)", "Step(0) Step(0)",
        "EndOfBackward: unit 0: it steps without gradients"},
       {"PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)",
        "Unsync PostBackward(0): Accumulate(0)\nPostBackward(0): Step(0)",
        "unit 0: it steps without all gradients"}});
}

}  // namespace
}  // namespace fsdp::testing
