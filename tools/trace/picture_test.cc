#include "tools/trace/picture.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/testing/status_matchers.h"
#include "fsdp/trace/trace_buffer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/drawing/lane_chart.h"
#include "tools/trace/breakdown.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using C = TraceCategory;
using drawing::LaneChart;

// Step `s` of rank r begins at 100 s + r and takes 10.
std::vector<RankTrace> Traces(int world_size, int64_t num_steps) {
  std::vector<RankTrace> traces(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    traces[rank].rank = rank;
    std::vector<Span>& spans = traces[rank].spans;
    for (int64_t step = 1; step <= num_steps; ++step) {
      const double t = 100.0 * static_cast<double>(step) + rank;
      spans.push_back({C::kStep, "", "", t, t + 10, 0, step});
      spans.push_back({C::kGathering, "", "a", t, t + 2});
      spans.push_back({C::kGatherWait, "WaitGather a", "a", t + 1, t + 2});
      spans.push_back({C::kForward, "forward a", "a", t + 2, t + 4});
      spans.push_back({C::kUser, "data", "", t + 5, t + 6});
    }
  }
  return traces;
}

absl::StatusOr<LaneChart> Draw(const std::vector<RankTrace>& traces,
                               const PictureOptions& options = {}) {
  return DrawStep(traces, BreakDown(traces), options);
}

TEST(PictureTest, DrawsTheLastStepOfAllRanks) {
  ASSERT_OK_AND_ASSIGN(const LaneChart chart, Draw(Traces(2, 3)));
  EXPECT_EQ(chart.title, "Step 3");
  EXPECT_THAT(chart.subtitle, HasSubstr("communication 1000.00 ms (10.0 %)"));
  EXPECT_EQ(chart.begin, 300);
  EXPECT_EQ(chart.end, 311);
  EXPECT_THAT(chart.lanes, SizeIs(8));
  EXPECT_EQ(chart.lanes[4].group, "rank 1");
  std::vector<std::string> bars;
  for (const LaneChart::Bar& bar : chart.bars) {
    if (chart.lanes[bar.lane].group != "rank 1") continue;
    bars.push_back(absl::StrCat(chart.lanes[bar.lane].name, ": ",
                                chart.styles[bar.style].name, " ", bar.label,
                                " ", bar.begin, "-", bar.end));
  }
  EXPECT_THAT(bars, ElementsAre("compute: wait for gather a 302-303",
                                "compute: forward a 303-305",
                                "the rest: data data 306-307",
                                "gathers: gather in flight a 301-303"));
}

TEST(PictureTest, AStepThatARankLacksIsNotTheLast) {
  std::vector<RankTrace> traces = Traces(2, 2);
  traces[0].spans.push_back({C::kStep, "", "", 900, 910, 0, 9});
  ASSERT_OK_AND_ASSIGN(const LaneChart chart, Draw(traces));
  EXPECT_EQ(chart.title, "Step 2");
}

TEST(PictureTest, DrawsWhatIsAskedFor) {
  PictureOptions options;
  options.step = 1;
  options.ranks = {2};
  ASSERT_OK_AND_ASSIGN(const LaneChart chart, Draw(Traces(3, 2), options));
  EXPECT_EQ(chart.title, "Step 1");
  EXPECT_THAT(chart.lanes, SizeIs(4));
  EXPECT_EQ(chart.lanes[0].group, "rank 2");
}

TEST(PictureTest, SaysHowManyRanksAreLeftOut) {
  ASSERT_OK_AND_ASSIGN(const LaneChart chart, Draw(Traces(9, 1)));
  EXPECT_THAT(chart.lanes, SizeIs(4 * 4));
  EXPECT_THAT(chart.subtitle, HasSubstr("5 more ranks are not drawn"));
}

TEST(PictureTest, RefusesStepsAndRanksThatAreNotThere) {
  PictureOptions options;
  options.step = 8;
  EXPECT_THAT(Draw(Traces(2, 2), options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("step 8 of rank 0")));
  options.step = 1;
  options.ranks = {1, 5};
  EXPECT_THAT(Draw(Traces(2, 2), options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("step 1 of rank 5")));
}

TEST(PictureTest, GathersAtTheSameTimeShareTheLane) {
  std::vector<RankTrace> traces = Traces(1, 1);
  traces[0].spans.push_back({C::kGathering, "", "b", 101, 103});
  traces[0].spans.push_back({C::kGathering, "", "c", 103, 200});
  ASSERT_OK_AND_ASSIGN(const LaneChart chart, Draw(traces));
  std::vector<std::string> parts;
  for (const LaneChart::Bar& bar : chart.bars) {
    if (chart.lanes[bar.lane].name != "gathers") continue;
    parts.push_back(absl::StrCat(bar.label, ": ", bar.part, " of ", bar.parts,
                                 " to ", bar.end));
  }
  // The last one is still in flight when the step ends.
  EXPECT_THAT(parts, ElementsAre("a: 0 of 2 to 102", "b: 1 of 2 to 103",
                                 "c: 0 of 2 to 110"));
}

}  // namespace
}  // namespace fsdp::trace_report
