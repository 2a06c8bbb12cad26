#include <cstdint>
#include <string>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/strings/str_split.h"
#include "base/testing/status_matchers.h"
#include "planner/simulator/simulator.h"
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
  return absl::StrSplit(
      "--ranks=3,16384 --layers=1 --dim=2 --vocab=3 --seq=4 --batch=5 "
      "--recompute --sharding=optimizer --shard_ranks=6 --reshard_root "
      "--backward_group=7 --noforward_prefetch --nobackward_prefetch "
      "--max_gathered_units=8 --max_reduce_buffers=9 --step_in_backward "
      "--backwards=10 --optimizer_state=1.5 --stored=fp64 --computed=fp16 "
      "--reduced=fp8 --tflops=11 --memory_gbps=12 --ranks_per_host=13 "
      "--host_latency=14us --host_gbps=15 --latency=16us --gbps=17",
      ' ');
}

TEST(FlagsTest, ReadsEveryFlag) {
  ASSERT_OK_AND_ASSIGN(const Settings settings, Parse(EveryFlag()));
  EXPECT_THAT(settings.ranks, ::testing::ElementsAre(3, 16384));
  EXPECT_EQ(settings.gpt.layers, 1);
  EXPECT_EQ(settings.gpt.dim, 2);
  EXPECT_EQ(settings.gpt.vocab, 3);
  EXPECT_EQ(settings.gpt.seq, 4);
  EXPECT_EQ(settings.gpt.batch, 5);
  EXPECT_TRUE(settings.gpt.recompute);
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
  EXPECT_EQ(costs.ranks_per_host, 13);
  EXPECT_EQ(costs.host.latency, 14e-6);
  EXPECT_EQ(costs.host.bandwidth, 15e9);
  EXPECT_EQ(costs.network.latency, 16e-6);
  EXPECT_EQ(costs.network.bandwidth, 17e9);
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
  EXPECT_THAT(Parse({"8"}), is_refused("what is 8?"));
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

}  // namespace
}  // namespace fsdp::simulator
