#include "planner/tool/report.h"

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "planner/simulator/model_shape.h"

namespace fsdp::simulator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::SizeIs;

ReportRow Row() {
  ReportRow row;
  row.ranks = 16;
  row.copies = 2;
  row.step.seconds = 0.5;
  Spent& total = row.step.total;
  total.compute = 0.25;
  total.copies = 0.0625;
  total.optimizer = 0.03125;
  total.gather = 0.375;
  total.reduce = 0.1875;
  total.exposed_gather = 0.125;
  total.exposed_reduce = 0.03125;
  total.gathered_bytes = 1000000;
  total.reduced_bytes = 2000000;
  total.replicated_bytes = 3000000;
  MemoryPlan& peak = row.step.peak;
  peak.shards = 1 << 20;
  peak.gradients = 2 << 20;
  peak.optimizer = 3 << 20;
  peak.gathered = 4 << 20;
  peak.parts = 5 << 20;
  peak.in_flight = 6 << 20;
  return row;
}

TEST(ReportTest, ATableHasTimesAndThenBytes) {
  const std::string table = StepTable({Row(), Row()});
  EXPECT_THAT(table, AllOf(HasSubstr("      16       2    500.000    250.000"
                                     "     62.500     31.250    125.000"
                                     "     31.250     31.2%\n"),
                           HasSubstr("      16        6.0        1.0        2.0"
                                     "        3.0        4.0        5.0"
                                     "        6.0       21.0\n")));
}

TEST(ReportTest, AStepWithoutTimeExposesNothing) {
  EXPECT_THAT(StepTable({ReportRow()}), HasSubstr("0.000      0.0%\n"));
}

TEST(ReportTest, CsvHasAValueForEachName) {
  const std::vector<std::string> lines =
      absl::StrSplit(StepCsv({Row(), Row()}), '\n');
  ASSERT_THAT(lines, SizeIs(4));  // the last is empty
  EXPECT_EQ(lines[1],
            "16,2,0.5,0.25,0.0625,0.03125,0.375,0.1875,0.125,0.03125,1000000,"
            "2000000,3000000,1048576,2097152,3145728,4194304,5242880,6291456,"
            "22020096");
  const std::vector<std::string> names = absl::StrSplit(lines[0], ',');
  const std::vector<std::string> values = absl::StrSplit(lines[1], ',');
  EXPECT_EQ(names.size(), values.size());
}

TEST(ReportTest, UnitsHaveALineEachAndOneForAll) {
  ModelShape model;
  model.units.resize(2);
  model.units[0].name = "root";
  model.units[1].name = "blocks.0";
  ReportRow row = Row();
  row.step.units = {row.step.total, Spent()};
  const std::string table = UnitTable(model, row.step);
  EXPECT_THAT(table, AllOf(HasSubstr("root                        250.000"
                                     "     62.500    375.000    125.000"
                                     "    187.500     31.250        6.0\n"),
                           HasSubstr("blocks.0 "), HasSubstr("all ")));
}

}  // namespace
}  // namespace fsdp::simulator
