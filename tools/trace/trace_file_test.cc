#include "tools/trace/trace_file.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/testing/status_matchers.h"
#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_json.h"
#include "fsdp/trace/trace_timeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::trace_report {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;

// Returns a step of a millisecond with a forward inside, which began `begin_ns`
// after the base.
std::string EventsOf(int rank, int64_t base_ns, int64_t begin_ns,
                     int64_t num_dropped = 0) {
  const int64_t now = base_ns + begin_ns;
  TraceTimeline timeline;
  timeline.spans = {
      {TraceCategory::kStep, "step 7", "", now, now + 1'000'000, 0, 7},
      {TraceCategory::kForward, "forward a", "a", now + 100, now + 201, 12}};
  timeline.memory = {{now, 1, 2}};
  return TraceEvents(timeline, {rank, base_ns, num_dropped});
}

absl::StatusOr<std::vector<RankTrace>> Parse(const std::string& text) {
  return ParseTraces({{"x.json", text}});
}

TEST(TraceFileTest, ReadsWhatTheLibraryWrites) {
  ASSERT_OK_AND_ASSIGN(
      const std::vector<RankTrace> traces,
      Parse(TraceFile({EventsOf(1, 5'000, 0), EventsOf(0, 5'000, 2'000, 3)})));
  ASSERT_EQ(traces.size(), 2);
  EXPECT_EQ(traces[0].rank, 0);
  EXPECT_EQ(traces[0].num_dropped, 3);
  EXPECT_EQ(traces[1].rank, 1);
  ASSERT_EQ(traces[0].spans.size(), 2);
  const Span& step = traces[0].spans[0];
  EXPECT_EQ(step.category, TraceCategory::kStep);
  EXPECT_EQ(step.step, 7);
  EXPECT_DOUBLE_EQ(step.begin, 2e-6);
  EXPECT_DOUBLE_EQ(step.end, 1002e-6);
  const Span& forward = traces[0].spans[1];
  EXPECT_EQ(forward.name, "forward a");
  EXPECT_EQ(forward.unit, "a");
  EXPECT_EQ(forward.bytes, 12);
  EXPECT_DOUBLE_EQ(forward.begin, 2.1e-6);
  EXPECT_DOUBLE_EQ(forward.end, 2.201e-6);
}

// Ranks of several hosts write their own files.
TEST(TraceFileTest, TimesOfSeveralFilesCountFromTheFirstOnesBase) {
  constexpr int64_t kNow = 1'700'000'000'000'000'000;
  ASSERT_OK_AND_ASSIGN(
      const std::vector<RankTrace> traces,
      ParseTraces({{"a", TraceFile({EventsOf(0, kNow, 1'000)})},
                   {"b", TraceFile({EventsOf(1, kNow - 3'000'001, 2'000)})}}));
  EXPECT_DOUBLE_EQ(traces[0].spans[0].begin, 1e-6);
  EXPECT_DOUBLE_EQ(traces[1].spans[0].begin, -2.998001e-3);
}

TEST(TraceFileTest, OuterSpansComeFirst) {
  std::string text = TraceFile({EventsOf(0, 0, 0)});
  text = absl::StrReplaceAll(text, {{"\"ts\":0.100", "\"ts\":0"}});
  ASSERT_OK_AND_ASSIGN(const std::vector<RankTrace> traces, Parse(text));
  EXPECT_EQ(traces[0].spans[0].name, "step 7");
}

TEST(TraceFileTest, RefusesWhatIsNoTrace) {
  const std::string whole = TraceFile({EventsOf(0, 0, 0)});
  for (const size_t length : {size_t{0}, size_t{1}, whole.size() / 2}) {
    EXPECT_THAT(Parse(whole.substr(0, length)),
                StatusIs(kInvalid, AllOf(HasSubstr("trace x.json: "),
                                         HasSubstr("written to its end?"))));
  }
  for (const char* text : {"[]", "{}", "3", R"({"traceEvents": 3})"}) {
    EXPECT_THAT(Parse(text), StatusIs(kInvalid, HasSubstr("this is no trace")));
  }
  for (const char* text : {R"({"traceEvents": []})",
                           R"({"traceEvents": [{"ph":"M","name":"x"}]})"}) {
    EXPECT_THAT(Parse(text),
                StatusIs(kInvalid, HasSubstr("not one of fsdp::Trace")));
  }
}

TEST(TraceFileTest, RefusesDamagedEventsByTheirNumber) {
  struct Case {
    const char* good;
    const char* bad;
    const char* message;
  };
  const std::string whole = TraceFile({EventsOf(0, 0, 0)});
  for (const Case& c : std::vector<Case>{
           {"\"base_ns\":\"0\"", "\"base_ns\":\"x\"", "is damaged"},
           {"\"base_ns\":\"0\"", "\"base\":\"0\"", "is damaged"},
           {"\"version\":1", "\"version\":2", "has version 2"},
           {"\"dur\":0.101", "\"duration\":0.101", "event 8: it lacks"},
           {"\"dur\":0.101", "\"dur\":\"0.101\"", "event 8: it lacks"},
           {"\"dur\":0.101", "\"dur\":-0.101",
            "event 8: it ends before it begins"},
           {"\"cat\":\"forward\"", "\"cat\":\"sideways\"",
            "event 8: unknown category \"sideways\""},
           {"\"cat\":\"forward\",\"pid\":0", "\"cat\":\"forward\",\"pid\":4",
            "event 8: its rank 4 has no event"},
           {"{\"ph\":\"X\",\"name\":\"forward a\"", "{\"name\":\"forward a\"",
            "event 8: it has no \"ph\""}}) {
    const std::string text = absl::StrReplaceAll(whole, {{c.good, c.bad}});
    ASSERT_NE(text, whole) << c.good;
    EXPECT_THAT(Parse(text),
                StatusIs(kInvalid, AllOf(HasSubstr("trace x.json: "),
                                         HasSubstr(c.message))));
  }
}

TEST(TraceFileTest, RefusesARankThatIsThereTwice) {
  const std::string one = TraceFile({EventsOf(2, 0, 0)});
  EXPECT_THAT(ParseTraces({{"a", one}, {"b", one}}),
              StatusIs(kInvalid, AllOf(HasSubstr("trace b: "),
                                       HasSubstr("rank 2 is there twice"))));
  EXPECT_THAT(Parse(TraceFile({EventsOf(2, 0, 0), EventsOf(2, 0, 0)})),
              StatusIs(kInvalid, HasSubstr("rank 2 is there twice")));
}

TEST(TraceFileTest, RefusesATraceWithoutSteps) {
  for (const int64_t num_dropped : {0, 4}) {
    const std::string text = TraceFile({TraceEvents({}, {3, 0, num_dropped})});
    EXPECT_THAT(
        Parse(text),
        StatusIs(kInvalid, AllOf(HasSubstr("rank 3 has no step"),
                                 HasSubstr("mark steps by fsdp::TraceStep"))));
  }
}

TEST(TraceFileTest, ReadsFilesAndNamesThoseItCannot) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/trace.json");
  std::ofstream(path) << TraceFile({EventsOf(0, 0, 0)});
  ASSERT_OK_AND_ASSIGN(const std::vector<RankTrace> traces, ReadTraces({path}));
  EXPECT_EQ(traces.size(), 1);
  const std::string missing = absl::StrCat(::testing::TempDir(), "/missing");
  EXPECT_THAT(ReadTraces({path, missing}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(missing)));
  EXPECT_THAT(ReadTraces({::testing::TempDir()}).status().message(),
              HasSubstr("is no regular file"));
}

}  // namespace
}  // namespace fsdp::trace_report
