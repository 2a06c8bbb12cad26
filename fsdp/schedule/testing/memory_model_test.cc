// Good traces, and ones that break one rule each.
#include "fsdp/schedule/testing/memory_model.h"

#include <string>

#include "fsdp/schedule/schedule.h"
#include "fsdp/schedule/testing/written_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StrEq;

std::string Twice(const std::string& trace) { return trace + trace; }

TEST(MemoryModelTest, TwoStepsAreGood) {
  EXPECT_THAT(Violation(Private(1), Twice(kStep)), StrEq(""));
}

TEST(MemoryModelTest, AUnitComputesWithoutBeingGathered) {
  EXPECT_THAT(Violation(Private(1), With(kStep, " WaitGather(1)", "")),
              HasSubstr("PreForward(1): unit 1: it computes and is not"));
  EXPECT_THAT(
      Violation(Private(1),
                With(kStep, "PostForward(0):", "PostForward(0): Free(0)")),
      HasSubstr("PreBackward(0): unit 0: it computes and is not"));
  // A child's end frees the unit around it.
  EXPECT_THAT(Violation(Private(1), With(kStep, "Free(1)", "Free(1) Free(0)")),
              HasSubstr("PostForward(1): unit 0: it computes and is not"));
  EXPECT_THAT(Violation(Private(1), With(kStep, "Free(1)", "Free(1) Free(0)",
                                         "PostBackward(1)")),
              HasSubstr("PostBackward(1): unit 0: it computes and is not"));
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
  const std::string trace = R"(
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
)";
  EXPECT_THAT(Violation(Private(1), trace), StrEq(""));
  EXPECT_THAT(Violation(Private(1), With(trace, ": Gather(1) WaitGather(1)",
                                         ":", "Recompute PreForward")),
              HasSubstr("PreForward(1): unit 1: it computes and is not"));
}

TEST(MemoryModelTest, AForwardReadsWhatWasThereBeforeTheLastWrite) {
  // The root is kept from one iteration to the next.
  const std::string forward = R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
Write
PreForward(0): Free(0) Gather(0) WaitGather(0)
)";
  EXPECT_THAT(Violation(Private(0), forward), StrEq(""));
  EXPECT_THAT(
      Violation(Private(0),
                With(forward, "Free(0) Gather(0) WaitGather(0)", "")),
      HasSubstr(
          "unit 0: the values of write 0 are read, and those of write 1"));
}

TEST(MemoryModelTest, AWriteComesWhileAGatherReads) {
  const std::string trace = R"(
Unshard(1): Gather(1) WaitGather(1)
Write
)";
  EXPECT_THAT(Violation(Private(1), trace), StrEq(""));
  EXPECT_THAT(Violation(Private(1), With(trace, " WaitGather(1)", "")),
              HasSubstr("unit 1: a shard is written while a gather reads it"));
}

TEST(MemoryModelTest, BackwardReadsOtherValuesThanForward) {
  Setting setting = Private(1);
  setting.options.step_in_backward = true;
  // Unit 1 is used twice and steps after the first of its reductions.
  const std::string trace = R"(
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
)";
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(
      Violation(setting, With(trace, "WaitReduce(1)", "WaitReduce(1) Step(1)")),
      HasSubstr(
          "unit 1: the values of write 1 are read, and those of write 0"));
}

// A forward without grad finds the values from the time of the request.
TEST(MemoryModelTest, AUnitThatWasAskedForHasTheValuesOfThen) {
  const std::string trace = R"(
Unshard(1): GatherCopy(1)
Write
WaitUnshard(1): WaitGather(1)
Write
PreForward(0): Gather(0) WaitGather(0)
PreForward(1):
)";
  EXPECT_THAT(Violation(Private(1), trace), StrEq(""));
  EXPECT_THAT(
      Violation(Private(1),
                With(trace, "PreForward(1):",
                     "PreForward(1): Free(1) Gather(1) WaitGather(1)")),
      HasSubstr(
          "the values of write 2 are read, and those of write 0 are due"));
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
  const std::string trace = R"(
PreForward(0): Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
PostForward(1): Shrink(1)
PostForward(0):
Write
PreForward(0): DropPart(1) Free(0) Gather(0) WaitGather(0)
PreForward(1): Gather(1) WaitGather(1)
)";
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(Violation(setting, With(trace, "DropPart(1) ", "")),
              HasSubstr("PreForward(1): unit 1: the values of write 0"));
  EXPECT_THAT(Violation(setting, With(trace, "Shrink(1)", "Free(1)")),
              HasSubstr("there is no part of it"));
  EXPECT_THAT(
      Violation(setting, With(trace, "Write", "Reset: Gather(1) DropPart(1)")),
      HasSubstr("its part is dropped while a gather reads it"));
}

TEST(MemoryModelTest, MemoryIsGivenBackWhileAGatherWritesIt) {
  EXPECT_THAT(Violation(Private(1), With(kStep, "PreBackward(0): Gather(1)",
                                         "PreBackward(0): Gather(1) Free(1)")),
              HasSubstr("unit 1: it is freed without being gathered"));
  EXPECT_THAT(
      Violation(Private(1), With(kStep, "Free(1)", "Shrink(1) Free(1)")),
      HasSubstr("unit 1: it is freed without being gathered"));
}

TEST(MemoryModelTest, AGatherOverwritesWhatIsThere) {
  EXPECT_THAT(Violation(Private(1), With(kStep, "Gather(1)", "Gather(0)")),
              HasSubstr("unit 0: it is gathered while it is there"));
  EXPECT_THAT(
      Violation(Private(1), With(kStep, "Gather(1)", "Gather(1) Gather(1)")),
      HasSubstr("unit 1: it is gathered while it is there"));
  EXPECT_THAT(Violation(Private(1), With(kStep, "WaitGather(1)",
                                         "WaitGather(1) WaitGather(1)")),
              HasSubstr("unit 1: no gather of it is in flight"));
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

TEST(SharedMemoryModelTest, TwoStepsAreGood) {
  EXPECT_THAT(Violation(Shared(1), Twice(kSharedStep)), StrEq(""));
  EXPECT_THAT(Violation(Shared(1, Sharing::kCommonCopy), Twice(kSharedStep)),
              StrEq(""));
}

TEST(SharedMemoryModelTest, AForwardBeginsBeforeAllHaveWritten) {
  const std::string steps =
      kSharedStep + With(kSharedStep, "OpenShards(0) ", "");
  EXPECT_THAT(
      Violation(Shared(1), steps),
      HasSubstr("PreForward(0): unit 0: rank 0 reads what rank 1 may be "
                "writing"));
  // The copy is stale.
  EXPECT_THAT(
      Violation(Shared(1, Sharing::kCommonCopy), steps),
      HasSubstr("PreForward(0): unit 0: the values of write 0 are read"));
}

// A frozen unit has no reduction that would order the ranks.
TEST(SharedMemoryModelTest, AWriteBeginsBeforeAllHaveRead) {
  const std::string step = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): CloseShards(0)
PreBackward(0):
Frozen PostBackward(0): Free(0)
EndOfBackward: CloseShards(0)
Write
)";
  EXPECT_THAT(Violation(Shared(0), step), StrEq(""));
  EXPECT_THAT(
      Violation(Shared(0), With(step, " CloseShards(0)", "", "EndOfBackward")),
      HasSubstr("write: unit 0: rank 0 writes its shard, which rank 2 may be"));
  const std::string forward = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): Free(0) CloseShards(0)
Write
)";
  EXPECT_THAT(Violation(Shared(0), forward), StrEq(""));
  EXPECT_THAT(Violation(Shared(0), With(forward, "CloseShards(0)", "")),
              HasSubstr("write: unit 0: rank 0 writes its shard"));
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
  Setting setting = Shared(0, Sharing::kCommonCopy);
  setting.options.step_in_backward = true;
  const std::string trace = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Reduce(0) WaitReduce(0) Step(0)
PreBackward(0):
)";
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(Violation(setting, trace + "Unshard(0): Free(0) Gather(0)"),
              HasSubstr("unit 0: it computes and is not gathered"));
  EXPECT_THAT(Violation(setting, trace + R"(
Unshard(0): OpenShards(0)
Unshard(0): Free(0) Gather(0)
)"),
              HasSubstr("unit 0: rank 0 writes its part of the common copy"));
}

TEST(SharedMemoryModelTest, ACopyIsReadBeforeOthersHaveWrittenTheirParts) {
  EXPECT_THAT(Violation(Shared(0, Sharing::kCommonCopy),
                        "PreForward(0): Gather(0) WaitGather(0)"),
              StrEq(""));
  EXPECT_THAT(
      Violation(Shared(0, Sharing::kCommonCopy), "PreForward(0): Gather(0)"),
      HasSubstr("it computes and is not gathered"));
}

TEST(SharedMemoryModelTest, ACopyDoesNotKeepOthersFromWritingTheirShards) {
  EXPECT_THAT(Violation(Shared(0, Sharing::kCommonCopy), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): Free(0)
Write
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
)"),
              StrEq(""));
}

// A unit steps while other ranks run its backward. Its reductions order that,
// but not what comes after them.
TEST(SharedMemoryModelTest, AUnitStepsWhileOthersReadIt) {
  Setting setting = Shared(0);
  setting.options.step_in_backward = true;
  const std::string trace = R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): CloseShards(0)
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)";
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(Violation(setting, R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
PostForward(0): CloseShards(0)
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Reduce(0)
PreBackward(0):
PreBackward(0): WaitReduce(0) Step(0)
)"),
              HasSubstr("unit 0: rank 0 writes its shard, which rank 2"));
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
  const std::string trace = R"(
Write
Unshard(1): OpenShards(0) Gather(1) WaitGather(1)
Look(1)
Reshard(1): Free(1) CloseShards(0)
Write
)";
  EXPECT_THAT(Violation(Shared(1), trace), StrEq(""));
  EXPECT_THAT(Violation(Shared(1), With(trace, "OpenShards(0) ", "")),
              HasSubstr("look: unit 1: rank 0 reads what rank 1 may be"));
  EXPECT_THAT(Violation(Shared(1), With(trace, " CloseShards(0)", "")),
              HasSubstr("write: unit 1: rank 0 writes its shard"));
}

TEST(SharedMemoryModelTest, ACopyIsOfTheValuesOfThenWhoeverWrites) {
  const std::string trace = R"(
Write
Unshard(1): GatherCopy(1)
Write
WaitUnshard(1): WaitGather(1)
Look(1)
Reshard(1): Free(1)
)";
  EXPECT_THAT(Violation(Shared(1), trace), StrEq(""));
  EXPECT_THAT(Violation(Shared(1), With(trace, "GatherCopy", "Gather")),
              HasSubstr("look: unit 1: "));
}

TEST(SharedMemoryModelTest, WhatAFailedIterationReadsDoesNotMatter) {
  EXPECT_THAT(Violation(Shared(0), R"(
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
Reset: Free(0)
Write
PreForward(0): OpenShards(0) Gather(0) WaitGather(0)
)"),
              StrEq(""));
}

}  // namespace
}  // namespace fsdp::testing
