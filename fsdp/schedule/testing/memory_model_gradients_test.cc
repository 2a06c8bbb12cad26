// Traces that lose gradients or use them too early, and good ones.
#include <string>

#include "fsdp/schedule/testing/written_trace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StrEq;

TEST(GradientModelTest, GradientsGoNowhere) {
  EXPECT_THAT(
      Violation(Private(1), With(kStep, "FillReduceBuffer(1) Free(1) Reduce(1)",
                                 "Free(1)")),
      HasSubstr("PostBackward(1): unit 1: its gradients go nowhere"));
}

TEST(GradientModelTest, AReductionIsStillInFlightAtTheEnd) {
  EXPECT_THAT(Violation(Private(1), With(kStep, "WaitReduce(1) ", "")),
              HasSubstr("EndOfBackward: unit 1: its reduction is in flight"));
  EXPECT_THAT(Violation(Private(1), With(kStep, " Reduce(1)", "")),
              HasSubstr("EndOfBackward: unit 1: no reduction of it can be"));
  EXPECT_THAT(Violation(Private(1), With(kStep, "Reduce(1)", "Reduce(0)")),
              HasSubstr("PostBackward(1): unit 0: no reduce buffer is filled"));
  EXPECT_THAT(Violation(Private(1), With(kStep, "WaitReduce(1)",
                                         "WaitReduce(1) WaitReduce(1)")),
              HasSubstr("EndOfBackward: unit 1: no reduction of it can be"));
}

TEST(GradientModelTest, NothingIsReduced) {
  EXPECT_THAT(Violation(Private(1), With(kStep, "FillReduceBuffer(0)",
                                         "FillReduceBuffer(1)")),
              HasSubstr("PostBackward(0): unit 1: it has no gradients"));
}

TEST(GradientModelTest, AReduceBufferIsFilledWhileOthersReadIt) {
  Setting setting = Private(1);
  setting.options.max_reduce_buffers = 1;
  EXPECT_THAT(
      Violation(setting, kStep),
      HasSubstr("PostBackward(0): unit 0: it overwrites a reduce buffer"));
  EXPECT_THAT(Violation(setting,
                        With(With(kStep, "FillReduceBuffer(0)",
                                  "WaitReduce(1) FillReduceBuffer(0)"),
                             "EndOfBackward: WaitReduce(1)", "EndOfBackward:")),
              StrEq(""));
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
  EXPECT_THAT(Violation(Private(0), kAccumulation), StrEq(""));
  EXPECT_THAT(Violation(Private(0), With(kAccumulation, "Accumulate(0) ", "")),
              HasSubstr("unit 0: its gradients go nowhere"));
  EXPECT_THAT(Violation(Private(0), With(kAccumulation, "Accumulate(0) ",
                                         "Accumulate(0) Accumulate(0) ")),
              HasSubstr("unit 0: it has no gradients"));
}

TEST(GradientModelTest, KeptGradientsAreLeftBehind) {
  // Unit 1 is not reached again.
  const std::string trace = R"(
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
)";
  EXPECT_THAT(Violation(Private(1), trace), StrEq(""));
  EXPECT_THAT(
      Violation(Private(1),
                With(With(trace, "FillReduceBuffer(1) Reduce(1) ", ""),
                     " WaitReduce(1)", "")),
      HasSubstr("EndOfBackward: unit 1: its gradients are not those of"));
}

TEST(GradientModelTest, AGivenUpIterationMayLoseGradients) {
  const std::string trace = R"(
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
)";
  EXPECT_THAT(Violation(Private(0), trace), StrEq(""));
  EXPECT_THAT(
      Violation(Private(0), With(trace, "Reset:", "Reset: WaitReduce(0)")),
      HasSubstr("Reset: unit 0: no reduction of it can be finished"));
}

TEST(GradientModelTest, KeptGradientsOutliveAnIterationThatIsGivenUp) {
  const std::string trace = With(kAccumulation, "Unsync EndOfBackward:\n",
                                 "Unsync EndOfBackward:\nReset:\n");
  EXPECT_THAT(Violation(Private(0), trace), StrEq(""));
  EXPECT_THAT(
      Violation(
          Private(0),
          With(With(trace, "PostBackward(0): FillReduceBuffer(0)",
                    "Frozen PostBackward(0):"),
               "Reduce(0)\nEndOfBackward: WaitReduce(0)", "\nEndOfBackward:")),
      HasSubstr("unit 0: its gradients are not those of the backwards"));
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
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(Violation(setting, With(trace, "Replicate(0) ", "")),
              HasSubstr("unit 0: no reduction of it can be finished"));
  EXPECT_THAT(Violation(Private(0), trace),
              HasSubstr("unit 0: there is nothing to replicate"));
}

TEST(GradientModelTest, AStepNeedsAllGradients) {
  Setting setting = Private(1);
  setting.options.step_in_backward = true;
  const std::string trace = R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
PostBackward(0): FillReduceBuffer(0) Free(0) Reduce(0)
EndOfBackward: WaitReduce(0) Step(0)
)";
  EXPECT_THAT(Violation(setting, trace), StrEq(""));
  EXPECT_THAT(Violation(setting, With(trace, " Step(0)", "")),
              HasSubstr("EndOfBackward: unit 0: it has not stepped"));
  EXPECT_THAT(
      Violation(setting,
                With(trace, "WaitReduce(0) Step(0)", "Step(0) WaitReduce(0)")),
      HasSubstr("EndOfBackward: unit 0: it steps before it is reduced"));
  EXPECT_THAT(Violation(setting, With(trace, "Step(0)", "Step(0) Step(0)")),
              HasSubstr("EndOfBackward: unit 0: it steps without gradients"));
  EXPECT_THAT(Violation(setting, R"(
PreForward(0): Gather(0) WaitGather(0)
PostForward(0):
PreBackward(0):
Unsync PostBackward(0): Accumulate(0)
PostBackward(0): Step(0)
)"),
              HasSubstr("unit 0: it steps without all gradients"));
}

}  // namespace
}  // namespace fsdp::testing
