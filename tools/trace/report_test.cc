#include "tools/trace/report.h"

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/trace/trace_buffer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tools/trace/breakdown.h"
#include "tools/trace/trace_file.h"

namespace fsdp::trace_report {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

using C = TraceCategory;

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

TEST(ReportTest, OneStepOfOneRankIsShort) {
  const std::string text = Text(Traces(1, 1));
  EXPECT_THAT(text,
              AllOf(HasSubstr("1 step of 1 rank"), Not(HasSubstr("mean  ")),
                    Not(HasSubstr("Ranks, in ms"))));
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
