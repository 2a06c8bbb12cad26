#include "fsdp/trace/trace_timeline.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "fsdp/trace/trace_buffer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Builds a rank's scopes; by default the clock counts their begins and ends.
class TraceTimelineTest : public ::testing::Test {
 protected:
  TraceTimelineTest() { UseBuffer(1000); }

  void UseBuffer(int64_t capacity) {
    buffer_ = std::make_unique<TraceBuffer>(capacity);
    buffer_->SetUnitBytes("root", {100, 10});
    buffer_->SetUnitBytes("a", {200, 20});
    buffer_->SetUnitBytes("b", {400, 40});
  }

  void Scope(absl::string_view range,
             const std::function<void()>& inside = nullptr) {
    const NamedScope parsed = ParseScope(range);
    buffer_->Begin(parsed.scope, parsed.name, now_++);
    if (inside) inside();
    buffer_->End(now_++);
  }
  // Records the event with these actions inside.
  void Event(absl::string_view event,
             const std::vector<std::string>& actions = {}) {
    Scope(event, [&] {
      for (const std::string& action : actions) Scope(action);
    });
  }
  void Step(int64_t number, const std::function<void()>& inside) {
    TraceScope scope = {TraceScope::Kind::kStep};
    scope.step = number;
    buffer_->Begin(scope, "step", now_++);
    inside();
    buffer_->End(now_++);
  }

  std::vector<std::string> SpansOf(const std::set<TraceCategory>& categories,
                                   int64_t last_steps = 0) const {
    std::vector<std::string> lines;
    for (const auto& span : MakeTimeline(*buffer_, last_steps).spans) {
      if (categories.count(span.category) == 0) continue;
      lines.push_back(
          absl::StrCat(span.name, " ", span.begin_ns, "-", span.end_ns));
    }
    return lines;
  }
  std::vector<std::string> Compute() const {
    return SpansOf({TraceCategory::kForward, TraceCategory::kRecompute,
                    TraceCategory::kBackward});
  }
  std::vector<std::string> Memory(int64_t last_steps = 0) const {
    std::vector<std::string> lines;
    for (const auto& sample : MakeTimeline(*buffer_, last_steps).memory) {
      lines.push_back(absl::StrCat(sample.time_ns, ": ", sample.unsharded, " ",
                                   sample.reduce_buffers));
    }
    return lines;
  }

  int64_t now_ = 0;
  std::unique_ptr<TraceBuffer> buffer_;
};

TEST_F(TraceTimelineTest, NothingRecordedIsNothing) {
  EXPECT_THAT(MakeTimeline(*buffer_, 0).spans, IsEmpty());
  EXPECT_THAT(MakeTimeline(*buffer_, 3).memory, IsEmpty());
}

TEST_F(TraceTimelineTest, TheInnermostUnitComputesBetweenEvents) {
  Event("fsdp::PreForward(root)");  // 0-1
  now_ = 10;
  Event("fsdp::PreForward(a)");  // 10-11
  now_ = 20;
  Event("fsdp::PostForward(a)");  // 20-21
  now_ = 30;
  Event("fsdp::PostForward(root)");  // 30-31
  now_ = 40;
  Event("fsdp::PreBackward(root)");  // 40-41
  now_ = 50;
  Event("fsdp::PreBackward(a)");  // 50-51
  now_ = 60;
  Event("fsdp::PostBackward(a)");  // 60-61
  now_ = 70;
  Event("fsdp::PostBackward(root)");  // 70-71
  now_ = 80;
  Event("fsdp::EndOfBackward(root)");  // 80-81
  EXPECT_THAT(Compute(),
              ElementsAre("forward root 1-10", "forward a 11-20",
                          "forward root 21-30", "backward root 41-50",
                          "backward a 51-60", "backward root 61-70"));
  EXPECT_THAT(SpansOf({TraceCategory::kPhase}),
              ElementsAre("forward of root 0-31", "backward of root 40-81"));
}

TEST_F(TraceTimelineTest, AForwardInBackwardRecomputes) {
  Event("fsdp::PreBackward(a)");
  Event("fsdp::PreForward(a)");   // 2-3
  Event("fsdp::PostForward(a)");  // 4-5
  Event("fsdp::PostBackward(a)");
  Event("fsdp::EndOfBackward(root)");
  EXPECT_THAT(Compute(), ElementsAre("backward a 1-2", "recompute a 3-4",
                                     "backward a 5-6"));
}

TEST_F(TraceTimelineTest, UnitsMayEndInAnyOrder) {
  Event("fsdp::PreBackward(a)");       // 0-1
  Event("fsdp::PreBackward(b)");       // 2-3
  Event("fsdp::PostBackward(a)");      // 4-5
  Event("fsdp::PostBackward(b)");      // 6-7
  Event("fsdp::PreBackward(root)");    // 8-9, nothing trainable: has no end
  Event("fsdp::EndOfBackward(root)");  // 10-11
  Event("fsdp::PreForward(a)");        // 12-13
  Event("fsdp::PostForward(a)");       // 14-15
  EXPECT_THAT(Compute(),
              ElementsAre("backward a 1-2", "backward b 3-4", "backward b 5-6",
                          "backward root 9-10", "forward a 13-14"));
}

TEST_F(TraceTimelineTest, AnIterationGivenUpLeavesNothingBehind) {
  Event("fsdp::PreForward(root)", {"fsdp::Gather(root)"});
  // The gather of unit a fails.
  Event("fsdp::PreForward(a)", {"fsdp::Gather(a)", "fsdp::Reset(root)"});
  now_ = 50;
  Event("fsdp::PreForward(root)");   // 50-51
  Event("fsdp::PostForward(root)");  // 52-53
  EXPECT_THAT(Compute(), ElementsAre("forward root 3-4", "forward root 51-52"));
  EXPECT_THAT(SpansOf({TraceCategory::kPhase}),
              ElementsAre("forward of root 50-53"));
  EXPECT_THAT(Memory(), ElementsAre("1: 100 0", "5: 300 0", "7: 0 0"));
}

TEST_F(TraceTimelineTest, AGatherIsInFlightUntilItsWaitIsOver) {
  Event("fsdp::PreForward(root)",
        {"fsdp::Gather(root)", "fsdp::WaitGather(root)"});  // 1-2, 3-4
  Event("fsdp::PreForward(a)", {"fsdp::Gather(a)", "fsdp::Gather(b)",
                                "fsdp::WaitGather(a)"});  // from 7, 9
  Event("fsdp::PreForward(b)", {"fsdp::WaitGather(b)"});  // 15-16
  Event("fsdp::Reshard(b)", {"fsdp::Free(b)"});
  EXPECT_THAT(SpansOf({TraceCategory::kGathering}),
              ElementsAre("all-gather of root 1-4", "all-gather of a 7-12",
                          "all-gather of b 9-16"));
  std::vector<int> lanes;
  for (const auto& span : MakeTimeline(*buffer_, 0).spans) {
    if (span.category == TraceCategory::kGathering) lanes.push_back(span.lane);
  }
  EXPECT_THAT(lanes, ElementsAre(0, 0, 1));
}

TEST_F(TraceTimelineTest, AGatherNobodyWaitedForEndsWithItsFree) {
  Event("fsdp::Unshard(a)", {"fsdp::Gather(a)"});
  Event("fsdp::Reshard(a)", {"fsdp::Free(a)"});
  EXPECT_THAT(SpansOf({TraceCategory::kGathering}),
              ElementsAre("all-gather of a 1-6"));
  EXPECT_THAT(Memory(), ElementsAre("1: 200 0", "6: 0 0"));
}

TEST_F(TraceTimelineTest, ReductionsEndInTheOrderOfTheirStart) {
  Event("fsdp::PostBackward(b)",
        {"fsdp::FillReduceBuffer(b)", "fsdp::Reduce(b)"});  // 1-2, 3-4
  Event("fsdp::PostBackward(a)",
        {"fsdp::FillReduceBuffer(a)", "fsdp::Reduce(a)"});  // 7-8, 9-10
  Event("fsdp::EndOfBackward(root)",
        {"fsdp::WaitReduce(b)", "fsdp::WaitReduce(a)"});  // 13-14, 15-16
  EXPECT_THAT(SpansOf({TraceCategory::kReducing}),
              ElementsAre("reduction of b 3-14", "reduction of a 9-16"));
  EXPECT_THAT(Memory(),
              ElementsAre("1: 0 40", "7: 0 60", "14: 0 20", "16: 0 0"));
}

TEST_F(TraceTimelineTest, GradientsKeptWholeBecomeTheReduceBuffer) {
  Event("fsdp::PostBackward(a)", {"fsdp::Accumulate(a)"});  // 1-2
  Event("fsdp::PostBackward(a)", {"fsdp::Accumulate(a)"});
  Event("fsdp::PostBackward(a)",
        {"fsdp::FillReduceBuffer(a)", "fsdp::Reduce(a)"});
  Event("fsdp::EndOfBackward(root)", {"fsdp::WaitReduce(a)"});  // 15-16
  EXPECT_THAT(Memory(), ElementsAre("1: 0 20", "16: 0 0"));
}

TEST_F(TraceTimelineTest, EveryActionHasItsCategory) {
  Event("fsdp::PostBackward(a)",
        {"fsdp::OpenShards(a)", "fsdp::Gather(a)", "fsdp::WaitGather(a)",
         "fsdp::Accumulate(a)", "fsdp::FillReduceBuffer(a)", "fsdp::Reduce(a)",
         "fsdp::Replicate(a)", "fsdp::WaitReduce(a)", "fsdp::Step(a)",
         "fsdp::Shrink(a)", "fsdp::DropPart(a)", "fsdp::Free(a)",
         "fsdp::CloseShards(a)"});
  Scope("fsdp::CheckOrder(root)");
  Scope("data");
  std::vector<std::string> lines;
  for (const auto& span : MakeTimeline(*buffer_, 0).spans) {
    lines.push_back(absl::StrCat(span.name, ": ", Name(span.category)));
    EXPECT_EQ(TraceCategoryOf(Name(span.category)), span.category);
  }
  EXPECT_THAT(
      lines, ElementsAre("PostBackward a: bookkeeping", "OpenShards a: fence",
                         "all-gather of a: gathering", "Gather a: start",
                         "WaitGather a: gather wait", "Accumulate a: copy",
                         "FillReduceBuffer a: copy", "reduction of a: reducing",
                         "Reduce a: start", "Replicate a: reduce wait",
                         "WaitReduce a: reduce wait", "Step a: optimizer",
                         "Shrink a: copy", "DropPart a: free", "Free a: free",
                         "CloseShards a: fence", "CheckOrder root: agreement",
                         "data: user"));
  EXPECT_EQ(TraceCategoryOf("nothing"), std::nullopt);
}

TEST_F(TraceTimelineTest, OnlyTheLastStepsAreKept) {
  for (int64_t step = 1; step <= 3; ++step) {
    now_ = 100 * step;
    Step(step, [&] {
      Scope("data");
      if (step == 1) Event("fsdp::Unshard(a)", {"fsdp::Gather(a)"});
    });
  }
  now_ = 400;
  Scope("after");
  EXPECT_THAT(SpansOf({TraceCategory::kStep, TraceCategory::kUser}, 2),
              ElementsAre("step 2 200-203", "data 201-202", "step 3 300-303",
                          "data 301-302", "after 400-401"));
  // What was gathered before counts from the beginning.
  EXPECT_THAT(Memory(2), ElementsAre("200: 200 0"));
  for (const int64_t all : {0, 3, 4}) {
    EXPECT_EQ(SpansOf({TraceCategory::kStep}, all).size(), 3) << all;
  }
}

// The buffer has dropped how units were gathered and reductions began.
TEST_F(TraceTimelineTest, ABeginningThatIsLostLeavesTheRestRight) {
  UseBuffer(9);
  Event("fsdp::PreForward(a)", {"fsdp::Gather(a)", "fsdp::WaitGather(a)"});
  Event("fsdp::PostBackward(b)",
        {"fsdp::FillReduceBuffer(b)", "fsdp::Reduce(b)"});
  Event("fsdp::PostForward(a)", {"fsdp::Free(a)"});
  Event("fsdp::EndOfBackward(root)", {"fsdp::WaitReduce(b)"});
  now_ = 50;
  Event("fsdp::PreForward(a)", {"fsdp::Gather(a)", "fsdp::WaitGather(a)"});
  Event("fsdp::PostForward(a)", {"fsdp::Free(a)"});
  EXPECT_GT(buffer_->num_dropped(), 0);
  EXPECT_THAT(Compute(), ElementsAre("forward a 55-56"));
  EXPECT_THAT(Memory(), ElementsAre("51: 200 0", "58: 0 0"));
}

}  // namespace
}  // namespace fsdp
