#include "tools/trace/report.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "fsdp/trace/trace_buffer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using C = TraceCategory;

std::vector<std::string> Lines(const std::vector<Slice>& slices) {
  std::vector<std::string> lines;
  lines.reserve(slices.size());
  for (const Slice& slice : slices) {
    lines.push_back(absl::StrCat(slice.begin, "-", slice.end, " ", slice.what,
                                 slice.unit.empty() ? "" : " of ", slice.unit));
  }
  return lines;
}

std::vector<std::string> Lines(const Times& times) {
  std::vector<std::string> lines;
  for (const auto& [what, seconds] : times) {
    lines.push_back(absl::StrFormat("%s %g", what, seconds));
  }
  return lines;
}

TEST(SlicesTest, AnEmptyRangeHasNone) {
  EXPECT_THAT(SlicesOf({}, 1, 1), IsEmpty());
  EXPECT_THAT(Lines(SlicesOf({}, 1, 2)), ElementsAre("1-2 other"));
}

TEST(SlicesTest, EveryMomentBelongsToTheInnermostSpan) {
  RankTrace trace;
  trace.spans = {{C::kStep, "step 1", "", 0, 20},
                 {C::kPhase, "forward of root", "root", 1, 18},
                 {C::kBookkeeping, "PreForward a", "a", 1, 9},
                 {C::kGathering, "all-gather of a", "a", 2, 5},
                 {C::kStart, "Gather a", "a", 2, 3},
                 {C::kGatherWait, "WaitGather a", "a", 4, 5},
                 {C::kForward, "forward a", "a", 9, 15},
                 {C::kFree, "Free a", "a", 17, 17}};
  EXPECT_THAT(
      Lines(SlicesOf(trace, 0, 20)),
      ElementsAre("0-1 other", "1-2 bookkeeping of a", "2-3 start of a",
                  "3-4 bookkeeping of a", "4-5 gather wait of a",
                  "5-9 bookkeeping of a", "9-15 forward of a", "15-20 other"));
  EXPECT_THAT(Lines(SlicesOf(trace, 4.5, 10)),
              ElementsAre("4.5-5 gather wait of a", "5-9 bookkeeping of a",
                          "9-10 forward of a"));
}

TEST(SlicesTest, TheUsersSpansHaveWhatIsLeftOfThem) {
  RankTrace trace;
  trace.spans = {{C::kUser, "forward and loss", "", 0, 10},
                 {C::kForward, "forward a", "a", 1, 4},
                 // It goes on while the unit inside is gathered.
                 {C::kUser, "attention", "", 2, 8},
                 {C::kBookkeeping, "PreForward b", "b", 4, 6},
                 {C::kForward, "forward b", "b", 6, 7}};
  EXPECT_THAT(
      Lines(SlicesOf(trace, 0, 12)),
      ElementsAre("0-1 forward and loss", "1-4 forward of a",
                  "4-6 bookkeeping of b", "6-7 forward of b", "7-8 attention",
                  "8-10 forward and loss", "10-12 other"));
}

// Has two ranks and two steps; every number below can be added up by hand.
std::vector<RankTrace> TwoRanks() {
  std::vector<RankTrace> traces(2);
  for (int rank = 0; rank < 2; ++rank) {
    traces[rank].rank = rank;
    for (int step = 1; step <= 2; ++step) {
      const double t = 100 * step + rank;
      std::vector<Span>& spans = traces[rank].spans;
      spans.push_back({C::kStep, "", "", t, t + 50, 0, step});
      spans.push_back({C::kUser, "data", "", t, t + 2});
      spans.push_back({C::kFence, "OpenShards a", "a", t + 2, t + 3});
      spans.push_back({C::kGathering, "", "a", t + 3, t + 8, 4'000'000});
      spans.push_back({C::kStart, "Gather a", "a", t + 3, t + 4});
      spans.push_back({C::kGatherWait, "WaitGather a", "a", t + 4, t + 8});
      spans.push_back({C::kForward, "forward a", "a", t + 8, t + 18 + rank});
      spans.push_back({C::kBackward, "backward a", "a", t + 20, t + 35});
      spans.push_back({C::kCopy, "Fill a", "a", t + 35, t + 37});
      spans.push_back({C::kReduceWait, "WaitReduce a", "a", t + 37, t + 40});
      spans.push_back({C::kOptimizer, "Step a", "a", t + 40, t + 41});
      spans.push_back({C::kUser, "optimizer", "", t + 41, t + 45});
      spans.push_back({C::kAgreement, "CheckOrder", "a", t + 45, t + 45.5});
    }
  }
  return traces;
}

TEST(BreakDownTest, SumsAreThoseAddedUpByHand) {
  const std::vector<StepTimes> steps = BreakDown(TwoRanks());
  ASSERT_EQ(steps.size(), 4);
  for (int i = 0; i < 4; ++i) {
    const int rank = i / 2;
    EXPECT_EQ(steps[i].rank, rank);
    EXPECT_EQ(steps[i].step, 1 + i % 2);
    EXPECT_EQ(steps[i].seconds(), 50);
    EXPECT_THAT(Lines(steps[i].times),
                ElementsAre("agreement 0.5", "backward 15", "copy 2", "data 2",
                            "fence 1", absl::StrCat("forward ", 10 + rank),
                            "gather wait 4", "optimizer 5",
                            absl::StrFormat("other %g", 6.5 - rank),
                            "reduce wait 3", "start 1"));
    EXPECT_EQ(steps[i].exposed(), 8.5);
    EXPECT_EQ(steps[i].compute(), 25 + rank);
    EXPECT_EQ(steps[i].Of("nothing"), 0);
    double sum = 0;
    for (const auto& [what, seconds] : steps[i].times) sum += seconds;
    EXPECT_DOUBLE_EQ(sum, 50);
    // Data, the user's optimizer and the rest belong to no unit.
    EXPECT_THAT(
        Lines(steps[i].units.at("a")),
        ElementsAre("agreement 0.5", "backward 15", "copy 2", "fence 1",
                    absl::StrCat("forward ", 10 + rank), "gather wait 4",
                    "optimizer 1", "reduce wait 3", "start 1"));
    EXPECT_EQ(steps[i].bytes_gathered.at("a"), 4'000'000);
  }
}

TEST(BreakDownTest, KindsAreInTheLibrarysOrderThenTheUsers) {
  EXPECT_THAT(
      KindsOf(BreakDown(TwoRanks())),
      ElementsAre("forward", "backward", "gather wait", "reduce wait", "fence",
                  "agreement", "copy", "start", "optimizer", "data", "other"));
  EXPECT_THAT(KindsOf({}), IsEmpty());
}

// Times are in milliseconds. The second rank computes one longer, and begins
// one later.
std::vector<RankTrace> Traces(int world_size, int64_t num_steps) {
  std::vector<RankTrace> traces(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    traces[rank].rank = rank;
    for (int64_t step = 1; step <= num_steps; ++step) {
      const auto add = [&](C category, const char* unit, double begin,
                           double end, int64_t bytes) {
        const double t = 100.0 * static_cast<double>(step) + rank;
        traces[rank].spans.push_back({category, "a name", unit,
                                      (t + begin) * 1e-3, (t + end) * 1e-3,
                                      bytes, step});
      };
      add(C::kStep, "", 0, 20, 0);
      add(C::kGathering, "a", 0, 2, 1'500'000);
      add(C::kGatherWait, "a", 0, 2, 0);
      add(C::kForward, "a", 2, 7 + rank, 0);
      add(C::kForward, "b", 9, 10, 0);
      add(C::kReduceWait, "b", 10, 11, 0);
    }
  }
  return traces;
}

std::string Text(const std::vector<RankTrace>& traces) {
  return ToText(traces, BreakDown(traces));
}

TEST(ReportTest, AddsUpStepsRanksAndUnits) {
  EXPECT_EQ(Text(Traces(2, 2)), R"(2 steps of 2 ranks

Steps, in ms, mean of the ranks
step   time  forward  gather wait  reduce wait  other
1     20.00     6.50         2.00         1.00  10.50
2     20.00     6.50         2.00         1.00  10.50
mean  20.00     6.50         2.00         1.00  10.50

Exposed communication: 3.00 ms a step, 15.0 % of it: gather wait 2.00, reduce wait 1.00

Ranks, in ms a step
rank   time  forward  gather wait  reduce wait  other
0     20.00     6.00         2.00         1.00  11.00
1     20.00     7.00         2.00         1.00  10.00
rank 1 computes longest, 7.7 % above the mean; ranks begin a step up to 1.00 ms apart

Units, in ms a step, mean of the ranks
unit  forward  gather wait  reduce wait  gathered MB
a        5.50         2.00         0.00         1.50
b        1.00         0.00         1.00         0.00
)");
}

TEST(ReportTest, StepsWithoutUnitsHaveNoTableOfThem) {
  RankTrace trace;
  trace.spans = {{C::kStep, "", "", 0, 0.5, 0, 3},
                 {C::kUser, "data", "", 0, 0.25}};
  EXPECT_EQ(Text({trace}), R"(1 step of 1 rank

Steps, in ms, mean of the ranks
step    time    data   other
3     500.00  250.00  250.00

Exposed communication: 0.00 ms a step, 0.0 % of it
)");
}

TEST(ReportTest, ToStartCollectivesIsNoWait) {
  std::vector<RankTrace> traces = Traces(1, 1);
  traces[0].spans.push_back({C::kStart, "Gather b", "b", 0.112, 0.1125});
  EXPECT_THAT(Text(traces),
              HasSubstr("communication: 3.00 ms a step, 15.0 % of it: gather "
                        "wait 2.00, reduce wait 1.00; to start collectives "
                        "takes 0.50 more\n"));
}

TEST(ReportTest, SaysWhatWasDropped) {
  std::vector<RankTrace> traces = Traces(2, 1);
  traces[1].num_dropped = 17;
  EXPECT_THAT(Text(traces), HasSubstr("rank 1 dropped its 17 oldest spans"));
}

TEST(ReportTest, CsvHasALineForEverySum) {
  std::vector<RankTrace> traces = Traces(1, 1);
  traces[0].spans.push_back({C::kUser, "a, \"b\"", "", 0.112, 0.113});
  EXPECT_EQ(ToCsv(BreakDown(traces)), R"(step,rank,unit,kind,ms
1,0,,step,20.000000
1,0,,"a, ""b""",1.000000
1,0,,forward,6.000000
1,0,,gather wait,2.000000
1,0,,other,10.000000
1,0,,reduce wait,1.000000
1,0,a,forward,5.000000
1,0,a,gather wait,2.000000
1,0,b,forward,1.000000
1,0,b,reduce wait,1.000000
)");
}

}  // namespace
}  // namespace fsdp::trace_report
