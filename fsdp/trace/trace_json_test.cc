#include "fsdp/trace/trace_json.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/testing/status_matchers.h"
#include "fsdp/trace/trace_buffer.h"
#include "fsdp/trace/trace_timeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using ::testing::ElementsAre;

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

// Viewers require these fields of each kind of event.
TEST(TraceJsonTest, EveryEventHasWhatItsKindNeeds) {
  const std::string events = TraceEvents(SmallTimeline(), {3, 1'500, 5});
  ASSERT_OK_AND_ASSIGN(const Json file, Json::Parse(TraceFile({events})));
  std::vector<std::string> lines;
  for (const Json& event : *file.Find("traceEvents")->As<Json::Array>()) {
    EXPECT_EQ(TextOf(event, "pid"), "3");
    const std::string kind = *event.Find("ph")->As<std::string>();
    if (kind == "X" || kind == "C") {
      lines.push_back(absl::StrCat(kind, " ", TextOf(event, "name"), " ",
                                   TextOf(event, "ts"), " ",
                                   TextOf(event, "dur")));
    }
    EXPECT_EQ(event.Find("tid") == nullptr, kind == "C");
    EXPECT_EQ(event.Find("cat") == nullptr, kind != "X");
    EXPECT_NE(event.Find("args"), nullptr);
  }
  EXPECT_THAT(lines, ElementsAre("X \"step 7\" -0.5 900.234",
                                 "X \"forward a\\\"\\n\" 0.5 0.5",
                                 "X \"all-gather of a\" 0.5 0.001",
                                 "X \"all-gather of b\" 0.5 0.001",
                                 "X \"reduction of a\" 0.5 0.001",
                                 "C \"unsharded parameters\" 0.5 ",
                                 "C \"reduce buffers\" 0.5 "));
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
