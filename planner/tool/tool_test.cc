#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "planner/simulator/cost_model.h"
#include "planner/simulator/model_shape.h"
#include "planner/simulator/step_simulator.h"
#include "planner/tool/command_line.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<Settings> Parse(std::vector<std::string> arguments) {
  absl::FlagSaver restore;
  arguments.insert(arguments.begin(), "simulate");
  std::vector<char*> argv;
  argv.reserve(arguments.size());
  for (std::string& argument : arguments) argv.push_back(&argument[0]);
  return ParseFlags(static_cast<int>(argv.size()), argv.data());
}

std::vector<std::string> EveryFlag() {
  return {"--ranks=3,16384",
          "--layers=1",
          "--dim=2",
          "--vocab=3",
          "--seq=4",
          "--batch=5",
          "--recompute",
          "--sharding=optimizer",
          "--shard_ranks=6",
          "--reshard_root",
          "--backward_group=7",
          "--noforward_prefetch",
          "--nobackward_prefetch",
          "--max_gathered_units=8",
          "--max_reduce_buffers=9",
          "--step_in_backward",
          "--backwards=10",
          "--optimizer_state=1.5",
          "--stored=fp64",
          "--computed=fp16",
          "--reduced=fp8",
          "--tflops=11",
          "--memory_gbps=12",
          "--host_memory_gbps=13",
          "--optimizer_gbps=14",
          "--cores=15",
          "--threads=16",
          "--network=any:1ms:2",
          "--algorithm=recursive",
          "--nooverlap",
          "--shared_memory",
          "--fence=5us",
          "--per_unit",
          "--csv=c"};
}

// This is the only test without BUILD_WORKING_DIRECTORY.
TEST(FlagsTest, ReadsEveryFlag) {
  unsetenv("BUILD_WORKING_DIRECTORY");
  ASSERT_OK_AND_ASSIGN(const Settings settings, Parse(EveryFlag()));
  EXPECT_THAT(settings.ranks, ::testing::ElementsAre(3, 16384));
  EXPECT_EQ(settings.gpt.layers, 1);
  EXPECT_EQ(settings.gpt.dim, 2);
  EXPECT_EQ(settings.gpt.vocab, 3);
  EXPECT_EQ(settings.gpt.seq, 4);
  EXPECT_EQ(settings.gpt.batch, 5);
  EXPECT_TRUE(settings.gpt.recompute);
  EXPECT_TRUE(settings.per_unit);
  EXPECT_EQ(settings.csv, "c");
  const ShardingOptions& sharding = settings.scenario.sharding;
  EXPECT_EQ(sharding.strategy, Strategy::kOptimizer);
  EXPECT_EQ(sharding.shard_ranks, 6);
  EXPECT_TRUE(sharding.reshard_root);
  EXPECT_EQ(sharding.backward_group_size, 7);
  EXPECT_EQ(sharding.stored_bytes, 8);
  EXPECT_EQ(sharding.compute_bytes, 2);
  EXPECT_EQ(sharding.reduce_bytes, 1);
  const StepOptions& step = settings.scenario.step;
  EXPECT_FALSE(step.schedule.forward_prefetch);
  EXPECT_FALSE(step.schedule.backward_prefetch);
  EXPECT_EQ(step.schedule.max_gathered_units, 8);
  EXPECT_EQ(step.schedule.max_reduce_buffers, 9);
  EXPECT_TRUE(step.schedule.step_in_backward);
  EXPECT_EQ(step.memory.backwards_per_step, 10);
  EXPECT_EQ(step.memory.optimizer_state, 1.5);
  const CostOptions& costs = settings.scenario.costs;
  EXPECT_EQ(costs.flops_per_second, 11e12);
  EXPECT_EQ(costs.memory_bandwidth, 12e9);
  EXPECT_EQ(costs.host_memory_bandwidth, 13e9);
  EXPECT_EQ(costs.optimizer_bandwidth, 14e9);
  EXPECT_EQ(costs.cores, 15);
  EXPECT_EQ(costs.threads, 16);
  EXPECT_EQ(costs.algorithm, Algorithm::kRecursive);
  EXPECT_FALSE(costs.overlap);
  EXPECT_TRUE(costs.shared_memory);
  EXPECT_EQ(costs.fence_seconds, 5e-6);
}

TEST(FlagsTest, ReadsLevelsOfTheNetwork) {
  ASSERT_OK_AND_ASSIGN(const std::vector<NetworkLevel> levels,
                       ParseNetwork("8:3us:450,4:5us:inf,any:1.5ms:0.5:0.25"));
  ASSERT_EQ(levels.size(), 3u);
  EXPECT_EQ(levels[0].members, 8);
  EXPECT_EQ(levels[0].latency, 3e-6);
  EXPECT_EQ(levels[0].bandwidth, 450e9);
  EXPECT_EQ(levels[0].reduce_bandwidth, 0);
  EXPECT_EQ(levels[1].bandwidth, std::numeric_limits<double>::infinity());
  EXPECT_EQ(levels[2].members, 0);
  EXPECT_EQ(levels[2].latency, 1.5e-3);
  EXPECT_EQ(levels[2].reduce_bandwidth, 0.25e9);
}

TEST(FlagsTest, SaysWhatALevelIs) {
  const auto is_refused = [](const char* what) {
    return StatusIs(absl::StatusCode::kInvalidArgument,
                    AllOf(HasSubstr("--network="), HasSubstr(what)));
  };
  EXPECT_THAT(ParseNetwork(""), is_refused("three numbers"));
  EXPECT_THAT(ParseNetwork("8:3us"), is_refused("three numbers"));
  EXPECT_THAT(ParseNetwork("8:3us:1:2:3"), is_refused("three numbers"));
  EXPECT_THAT(ParseNetwork("0:3us:1"), is_refused("as members"));
  EXPECT_THAT(ParseNetwork("x:3us:1"), is_refused("as members"));
  EXPECT_THAT(ParseNetwork("8:3:1"), is_refused("as the latency"));
  EXPECT_THAT(ParseNetwork("8:-3us:1"), is_refused("as the latency"));
  EXPECT_THAT(ParseNetwork("8:3us:0"), is_refused("positive bandwidth"));
  EXPECT_THAT(ParseNetwork("8:3us:1:x"), is_refused("positive bandwidth"));
  EXPECT_THAT(ParseNetwork("any:3us:1,8:3us:1"), is_refused("last level only"));
}

TEST(FlagsTest, NamesTheFlagThatIsWrong) {
  const auto is_refused = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  for (const char* ranks : {"", "0", "-1", "16385", "8,", "x"}) {
    EXPECT_THAT(Parse({std::string("--ranks=") + ranks}),
                is_refused("numbers from 1 to 16384"));
  }
  EXPECT_THAT(Parse({"--sharding=half"}),
              is_refused("--sharding=half: expected one of full, gradients, "
                         "optimizer, replicated"));
  EXPECT_THAT(Parse({"--stored=int8"}), is_refused("--stored=int8: expected"));
  EXPECT_THAT(Parse({"--computed=x"}), is_refused("--computed=x"));
  EXPECT_THAT(Parse({"--reduced=x"}), is_refused("--reduced=x"));
  EXPECT_THAT(Parse({"--algorithm=tree"}), is_refused("--algorithm=tree"));
  EXPECT_THAT(Parse({"8"}), is_refused("unexpected argument \"8\""));
}

TEST(FlagsTest, PathsAreTheUsers) {
  setenv("BUILD_WORKING_DIRECTORY", "/home/user", /*overwrite=*/1);
  ASSERT_OK_AND_ASSIGN(const Settings settings, Parse({"--csv=c"}));
  unsetenv("BUILD_WORKING_DIRECTORY");
  EXPECT_EQ(settings.csv, "/home/user/c");
}

StepResult Row() {
  StepResult row;
  row.ranks = 16;
  row.copies = 2;
  row.seconds = 0.5;
  Spent& total = row.total;
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
  MemoryPlan& peak = row.peak;
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
  EXPECT_THAT(StepTable({StepResult()}), HasSubstr("0.000      0.0%\n"));
}

TEST(ReportTest, CsvHasAValueForEachName) {
  const std::vector<std::string> lines =
      absl::StrSplit(StepCsv({Row(), Row()}), '\n');
  ASSERT_THAT(lines, ::testing::SizeIs(4));  // the last is empty
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
  StepResult row = Row();
  row.units = {row.total, Spent()};
  const std::string table = UnitTable(model, row);
  EXPECT_THAT(table, AllOf(HasSubstr("root                        250.000"
                                     "     62.500    375.000    125.000"
                                     "    187.500     31.250        6.0\n"),
                           HasSubstr("blocks.0 "), HasSubstr("all ")));
}

}  // namespace
}  // namespace fsdp::simulator
