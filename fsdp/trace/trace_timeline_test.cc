#include "fsdp/trace/trace_timeline.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = TraceScope::Kind;

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
  void EventAt(int64_t now, absl::string_view event,
               const std::vector<std::string>& actions = {}) {
    now_ = now;
    Event(event, actions);
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
  Event("fsdp::PreForward(root)");           // 0-1
  EventAt(10, "fsdp::PreForward(a)");        // 10-11
  EventAt(20, "fsdp::PostForward(a)");       // 20-21
  EventAt(30, "fsdp::PostForward(root)");    // 30-31
  EventAt(40, "fsdp::PreBackward(root)");    // 40-41
  EventAt(50, "fsdp::PreBackward(a)");       // 50-51
  EventAt(60, "fsdp::PostBackward(a)");      // 60-61
  EventAt(70, "fsdp::PostBackward(root)");   // 70-71
  EventAt(80, "fsdp::EndOfBackward(root)");  // 80-81
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
  EventAt(50, "fsdp::PreForward(root)");  // 50-51
  Event("fsdp::PostForward(root)");       // 52-53
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
  EventAt(50, "fsdp::PreForward(a)",
          {"fsdp::Gather(a)", "fsdp::WaitGather(a)"});
  Event("fsdp::PostForward(a)", {"fsdp::Free(a)"});
  EXPECT_GT(buffer_->num_dropped(), 0);
  EXPECT_THAT(Compute(), ElementsAre("forward a 55-56"));
  EXPECT_THAT(Memory(), ElementsAre("51: 200 0", "58: 0 0"));
}

std::vector<std::string> Names(const TraceBuffer& buffer) {
  std::vector<std::string> names;
  for (const TraceBuffer::Record& record : buffer.Records()) {
    names.push_back(absl::StrCat(buffer.name(record.name), " ", record.begin_ns,
                                 "-", record.end_ns));
  }
  return names;
}

TEST(ParseScopeTest, KnowsEveryEventAndAction) {
  for (int i = 0; i <= static_cast<int>(ActionKind::kCloseShards); ++i) {
    const auto action = static_cast<ActionKind>(i);
    const std::string range = absl::StrCat("fsdp::", Name(action), "(a.0)");
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kAction) << range;
    EXPECT_EQ(parsed.scope.action, action) << range;
    EXPECT_EQ(parsed.name, "a.0") << range;
  }
  for (int i = 0; i <= static_cast<int>(EventKind::kRelease); ++i) {
    const auto event = static_cast<EventKind>(i);
    const std::string range = absl::StrCat("fsdp::", Name(event), "(root)");
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kEvent) << range;
    EXPECT_EQ(parsed.scope.event, event) << range;
    EXPECT_EQ(parsed.name, "root") << range;
  }
  EXPECT_EQ(ParseScope("fsdp::CheckOrder(root)").scope.kind, Kind::kOrderCheck);
}

TEST(ParseScopeTest, AnythingElseIsTheUsers) {
  for (const char* range :
       {"", "data", "fsdp::", "fsdp::Gather", "fsdp::Gather(", "Gather(a)",
        "fsdp::Mine(a)", "fsdp::Gather(a) "}) {
    const NamedScope parsed = ParseScope(range);
    EXPECT_EQ(parsed.scope.kind, Kind::kUser) << range;
    EXPECT_EQ(parsed.name, range);
  }
  EXPECT_EQ(ParseScope("fsdp::Gather(a(0))").name, "a(0)");
}

TEST(TraceBufferTest, OpenScopesAreNotThereYetAndAnEndWithoutBeginIsNothing) {
  TraceBuffer buffer(10);
  buffer.End(1);
  buffer.Begin({Kind::kUser}, "open", 1);
  EXPECT_THAT(Names(buffer), IsEmpty());
  buffer.End(2);
  buffer.End(3);
  EXPECT_THAT(Names(buffer), ElementsAre("open 1-2"));
}

TEST(TraceBufferTest, KeepsTheNewestAndCountsTheOthers) {
  for (const int64_t capacity : {1, 2, 7}) {
    TraceBuffer buffer(capacity);
    for (int64_t i = 0; i < 13; ++i) {
      buffer.Begin({Kind::kUser}, "x", i);
      buffer.End(i);
      std::vector<int64_t> begins;
      for (const auto& record : buffer.Records()) {
        begins.push_back(record.begin_ns);
      }
      std::vector<int64_t> expected;
      for (int64_t k = std::max<int64_t>(0, i + 1 - capacity); k <= i; ++k) {
        expected.push_back(k);
      }
      EXPECT_EQ(begins, expected);
      EXPECT_EQ(buffer.num_dropped(), std::max<int64_t>(0, i + 1 - capacity));
    }
  }
}

TEST(TraceBufferTest, AClockSetBackGivesAnEmptyScope) {
  TraceBuffer buffer(1);
  buffer.Begin({Kind::kUser}, "x", 10);
  buffer.End(4);
  EXPECT_THAT(Names(buffer), ElementsAre("x 10-10"));
}

TEST(TraceBufferTest, VeryManyNamesShareOne) {
  TraceBuffer buffer(1);
  for (int i = 0; i < 70'000; ++i) {
    buffer.Begin({Kind::kUser}, absl::StrCat("name ", i), i);
    buffer.End(i);
  }
  EXPECT_THAT(Names(buffer),
              ElementsAre("(one of very many names) 69999-69999"));
}

TEST(TraceBufferTest, UnitsHaveTheBytesTheyWereGivenLast) {
  TraceBuffer buffer(2);
  buffer.Begin({Kind::kAction}, "a", 0);
  buffer.End(1);
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).unsharded, 0);
  buffer.SetUnitBytes("a", {10, 20});
  buffer.SetUnitBytes("b", {30, 40});
  buffer.SetUnitBytes("a", {11, 21});
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).unsharded, 11);
  EXPECT_EQ(buffer.unit_bytes(buffer.Records()[0].name).reduce_buffer, 21);
}

TraceTimeline SmallTimeline() {
  TraceTimeline timeline;
  timeline.spans = {
      {TraceCategory::kStep, "step 7", "", 1'000, 901'234, 0, 7},
      {TraceCategory::kForward, "forward a\"\n", "a\"\n", 2'000, 2'500},
      {TraceCategory::kGathering, "all-gather of a", "a", 2'000, 2'001, 12},
      {TraceCategory::kGathering, "all-gather of b", "b", 2'000, 2'001, 12, 0,
       1},
      {TraceCategory::kReducing, "reduction of a", "a", 2'000, 2'001, 12}};
  timeline.memory = {{2'000, 12, 34}};
  return timeline;
}

std::string TextOf(const Json& event, absl::string_view key) {
  const Json* value = event.Find(key);
  return value == nullptr ? "" : value->ToString();
}

// Viewers and //tools:trace_report require these fields of each kind of event.
TEST(TraceJsonTest, EveryEventHasWhatItsKindNeeds) {
  const std::string events = TraceEvents(SmallTimeline(), {3, 1'500, 5});
  ASSERT_OK_AND_ASSIGN(const Json file, Json::Parse(TraceFile({events})));
  std::vector<std::string> lines;
  for (const Json& event : *file.Find("traceEvents")->As<Json::Array>()) {
    EXPECT_EQ(TextOf(event, "pid"), "3");
    const std::string kind = *event.Find("ph")->As<std::string>();
    if (kind == "X" || kind == "C") {
      lines.push_back(absl::StrCat(
          kind, " ", TextOf(event, "name"), " ", TextOf(event, "ts"), " ",
          TextOf(event, "dur"), " ", TextOf(event, "args")));
    }
    EXPECT_EQ(event.Find("tid") == nullptr, kind == "C");
    EXPECT_EQ(event.Find("cat") == nullptr, kind != "X");
    EXPECT_NE(event.Find("args"), nullptr);
  }
  EXPECT_THAT(
      lines,
      ElementsAre(R"(X "step 7" -0.5 900.234 {"step": 7})",
                  R"(X "forward a\"\n" 0.5 0.5 {"unit": "a\"\n"})",
                  R"(X "all-gather of a" 0.5 0.001 {"unit": "a", "bytes": 12})",
                  R"(X "all-gather of b" 0.5 0.001 {"unit": "b", "bytes": 12})",
                  R"(X "reduction of a" 0.5 0.001 {"unit": "a", "bytes": 12})",
                  R"(C "unsharded parameters" 0.5  {"bytes": 12})",
                  R"(C "reduce buffers" 0.5  {"bytes": 34})"));
}

TEST(TraceJsonTest, RowsAndProcessHaveNames) {
  const std::string events = TraceEvents(SmallTimeline(), {3, 0, 5});
  ASSERT_OK_AND_ASSIGN(const Json file, Json::Parse(TraceFile({events})));
  std::vector<std::string> lines;
  for (const Json& event : *file.Find("traceEvents")->As<Json::Array>()) {
    if (TextOf(event, "ph") != "\"M\"") continue;
    if (TextOf(event, "name") == "\"thread_sort_index\"") continue;
    lines.push_back(TextOf(event, "args"));
  }
  EXPECT_THAT(lines,
              ElementsAre(R"({"version": 1, "base_ns": "0", "dropped": 5})",
                          R"({"name": "rank 3"})", R"({"sort_index": 3})",
                          R"({"name": "steps"})", R"({"name": "compute"})",
                          R"({"name": "gathers in flight 1"})",
                          R"({"name": "gathers in flight 2"})",
                          R"({"name": "reductions in flight 1"})"));
}

TEST(TraceJsonTest, AnEmptyTraceIsAFile) {
  ASSERT_OK_AND_ASSIGN(const Json file,
                       Json::Parse(TraceFile({TraceEvents({}, {0, 0, 0}),
                                              TraceEvents({}, {1, 0, 0})})));
  EXPECT_EQ(file.Find("traceEvents")->As<Json::Array>()->size(), 6);
}

}  // namespace
}  // namespace fsdp
