#include "tools/drawing/lane_chart.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::drawing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

int Count(absl::string_view text, absl::string_view part) {
  int count = 0;
  for (size_t at = text.find(part); at != absl::string_view::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// Ten seconds wide: 118 pixels for a second.
LaneChart SmallChart() {
  LaneChart chart;
  chart.title = "a < b";
  chart.subtitle = "\"c\" & d";
  chart.end = 10;
  chart.styles = {{"plain", "#111111", "#ffffff"},
                  {"hatched", "#222222", "", true},
                  {"unused", "#333333", "#ffffff"}};
  chart.lanes = {{"rank 0", "compute"}, {"rank 0", "rest"}, {"rank 1", "all"}};
  return chart;
}

LaneChart::Bar MakeBar(int lane, int style, double begin, double end) {
  LaneChart::Bar bar;
  bar.lane = lane;
  bar.style = style;
  bar.begin = begin;
  bar.end = end;
  bar.label = "blocks.7";
  bar.title = "forward blocks.7";
  return bar;
}

TEST(LaneChartTest, NothingToDrawIsAFile) {
  EXPECT_THAT(ToSvg({}), AllOf(HasSubstr("<svg "), HasSubstr("</svg>\n")));
}

TEST(LaneChartTest, TextIsEscaped) {
  LaneChart chart = SmallChart();
  chart.lanes[0].name = "x<\n>";
  EXPECT_THAT(ToSvg(chart), AllOf(HasSubstr(">a &lt; b</text>"),
                                  HasSubstr(">&quot;c&quot; &amp; d</text>"),
                                  HasSubstr(">x&lt; &gt;</text>")));
}

TEST(LaneChartTest, BarsAreWhereTheirTimesAre) {
  LaneChart chart = SmallChart();
  chart.begin = 100;
  chart.end = 110;
  chart.bars = {MakeBar(0, 0, 101, 103)};
  EXPECT_THAT(ToSvg(chart),
              AllOf(HasSubstr("<title>forward blocks.7: 2 s, from 1 s</title>"
                              "<rect x=\"268.00\" y=\"72.00\" "
                              "width=\"236.00\" height=\"30.00\""),
                    HasSubstr(">blocks.7</text>")));
}

TEST(LaneChartTest, ALabelIsCutToWhatFits) {
  LaneChart chart = SmallChart();
  chart.bars = {MakeBar(0, 0, 0, 0.2)};  // 23.6 pixels
  EXPECT_THAT(ToSvg(chart), AllOf(HasSubstr(">7</text>"),
                                  Not(HasSubstr(">blocks.7</text>"))));
  chart.bars = {MakeBar(0, 0, 0, 0.05)};
  EXPECT_THAT(ToSvg(chart), AllOf(Not(HasSubstr(">7</text>")),
                                  Not(HasSubstr(">blocks.7</text>"))));
  chart.bars = {MakeBar(0, 1, 0, 5)};
  EXPECT_THAT(ToSvg(chart), Not(HasSubstr(">blocks.7</text>")));
}

TEST(LaneChartTest, BarsOfOneTimeShareTheHeight) {
  LaneChart chart = SmallChart();
  for (int part = 0; part < 2; ++part) {
    chart.bars.push_back(MakeBar(1, 0, 1, 2));
    chart.bars.back().part = part;
    chart.bars.back().parts = 2;
  }
  EXPECT_THAT(
      ToSvg(chart),
      AllOf(HasSubstr("y=\"107.00\" width=\"118.00\" height=\"15.00\""),
            HasSubstr("y=\"122.00\" width=\"118.00\" height=\"15.00\"")));
}

TEST(LaneChartTest, OnlyStylesInUseAreInTheLegend) {
  LaneChart chart = SmallChart();
  chart.bars = {MakeBar(0, 0, 0, 1), MakeBar(0, 1, 1, 2)};
  const std::string svg = ToSvg(chart);
  EXPECT_THAT(svg,
              AllOf(HasSubstr(">plain</text>"), HasSubstr(">hatched</text>"),
                    HasSubstr("fill=\"url(#hatch1)\""),
                    HasSubstr("<pattern id=\"hatch1\"")));
  EXPECT_THAT(svg, Not(HasSubstr(">unused</text>")));
}

TEST(LaneChartTest, AGroupIsNamedOnce) {
  const std::string svg = ToSvg(SmallChart());
  EXPECT_EQ(Count(svg, ">rank 0</text>"), 1);
  EXPECT_EQ(Count(svg, ">rank 1</text>"), 1);
  for (const char* lane : {"compute", "rest", "all"}) {
    EXPECT_EQ(Count(svg, absl::StrCat(">", lane, "</text>")), 1) << lane;
  }
}

TEST(LaneChartTest, TheAxisHasRoundTimes) {
  const std::vector<std::pair<double, const char*>> ticks = {
      {10, ">3 s</text>"},
      {0.137, ">130 ms</text>"},
      {0.02, ">18 ms</text>"},
      {7e-6, ">6.5 us</text>"}};
  for (const auto& [length, tick] : ticks) {
    LaneChart chart = SmallChart();
    chart.end = length;
    const std::string svg = ToSvg(chart);
    EXPECT_THAT(svg, HasSubstr(tick)) << length;
    EXPECT_LE(Count(svg, "stroke=\"#d4d4d4\""), 25) << length;
    EXPECT_GE(Count(svg, "stroke=\"#d4d4d4\""), 10) << length;
  }
}

// A thousand bars of two microseconds in a chart of ten seconds.
TEST(LaneChartTest, BarsTooNarrowToSeeBecomeOne) {
  LaneChart chart = SmallChart();
  for (int i = 0; i < 1000; ++i) {
    const double begin = 1 + i * 2e-6;
    chart.bars.push_back(MakeBar(0, i % 3 == 0 ? 0 : 1, begin, begin + 2e-6));
  }
  const std::string svg = ToSvg(chart);
  EXPECT_EQ(Count(svg, "<title>"), 1);
  EXPECT_THAT(svg, HasSubstr("<title>forward blocks.7 and 999 more: 2 ms, from "
                             "1 s</title>"));
  EXPECT_THAT(svg, HasSubstr("height=\"30.00\" fill=\"url(#hatch1)\""));
}

}  // namespace
}  // namespace fsdp::drawing
