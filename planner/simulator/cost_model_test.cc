#include "planner/simulator/cost_model.h"

#include <cstdint>
#include <limits>

#include "absl/status/status.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

CostOptions OneLevel(double latency, double bandwidth) {
  CostOptions options;
  options.flops_per_second = 1e12;
  options.memory_bandwidth = 1e9;
  options.levels = {{0, latency, bandwidth}};
  return options;
}

// Has hosts of 8 ranks.
CostOptions TwoLevels() {
  CostOptions options = OneLevel(0, 1);
  options.levels = {{8, 1e-6, 100e9}, {0, 10e-6, 50e9}};
  return options;
}

CostModel Create(const CostOptions& options, int ranks) {
  absl::StatusOr<CostModel> model = CostModel::Create(options, ranks);
  EXPECT_OK(model);
  return *model;
}

TEST(CostModelTest, ARingPassesAllPiecesButOnesOwn) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const CostModel model = Create(OneLevel(1e-3, 1e6), ranks);
    const double once = (ranks - 1) * (1e-3 + 100 / 1e6);
    const auto seconds = [&](Collective collective) {
      return model.CollectiveSeconds(collective, {ranks, 1},
                                     int64_t{100} * ranks);
    };
    EXPECT_DOUBLE_EQ(seconds(Collective::kAllGather), once);
    EXPECT_DOUBLE_EQ(seconds(Collective::kReduceScatter), once);
    EXPECT_DOUBLE_EQ(seconds(Collective::kAllReduce), 2 * once);
  }
}

TEST(CostModelTest, AlgorithmsAgreeOnOneLevelButForLatency) {
  CostOptions options = OneLevel(1e-3, 1e6);
  options.algorithm = Algorithm::kRing;
  const double ring =
      Create(options, 8)
          .CollectiveSeconds(Collective::kAllGather, {8, 1}, 8000);
  options.algorithm = Algorithm::kHierarchical;
  EXPECT_DOUBLE_EQ(Create(options, 8)
                       .CollectiveSeconds(Collective::kAllGather, {8, 1}, 8000),
                   ring);
  options.algorithm = Algorithm::kRecursive;
  EXPECT_DOUBLE_EQ(Create(options, 8)
                       .CollectiveSeconds(Collective::kAllGather, {8, 1}, 8000),
                   ring - 4e-3);
}

TEST(CostModelTest, HierarchyExchangesBetweenHostsAndThenInside) {
  const CostModel model = Create(TwoLevels(), 32);
  // 8 ranks of a host share its link; inside, each piece stands for 4 hosts.
  const double piece = 1e6;
  const double between = 3 * (10e-6 + 8 * piece / 50e9);
  const double inside = 7 * (1e-6 + 4 * piece / 100e9);
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kAllGather, {32, 1}, 32000000),
      between + inside);
}

TEST(CostModelTest, ARingIsAsFastAsItsSlowestLink) {
  CostOptions options = TwoLevels();
  options.algorithm = Algorithm::kRing;
  const CostModel model = Create(options, 32);
  const auto gather = [&](Group group) {
    return model.CollectiveSeconds(Collective::kAllGather, group,
                                   int64_t{1000000} * group.size);
  };
  EXPECT_DOUBLE_EQ(gather({32, 1}), 31 * (10e-6 + 1e6 / 50e9));
  EXPECT_DOUBLE_EQ(gather({8, 1}), 7 * (1e-6 + 1e6 / 100e9));
  // The group has one rank of each host: 8 rings share the host's link.
  EXPECT_DOUBLE_EQ(gather({4, 8}), 3 * (10e-6 + 8e6 / 50e9));
}

TEST(CostModelTest, GroupsInsideAHostDoNotUseTheNetwork) {
  CostOptions slow = TwoLevels();
  slow.levels[1] = {0, 1, 1};
  const CostModel model = Create(slow, 32);
  EXPECT_EQ(model.CollectiveSeconds(Collective::kAllReduce, {8, 1}, 8000),
            Create(TwoLevels(), 8)
                .CollectiveSeconds(Collective::kAllReduce, {8, 1}, 8000));
  EXPECT_EQ(model.RanksOnHost({32, 1}), 8);
  EXPECT_EQ(model.RanksOnHost({8, 4}), 2);
  EXPECT_EQ(model.RanksOnHost({4, 8}), 1);
}

TEST(CostModelTest, ReductionsMayHaveABandwidthOfTheirOwn) {
  CostOptions options = OneLevel(0, 1e6);
  options.levels[0].reduce_bandwidth = 5e5;
  const CostModel model = Create(options, 2);
  const auto seconds = [&](Collective collective) {
    return model.CollectiveSeconds(collective, {2, 1}, 2000);
  };
  EXPECT_DOUBLE_EQ(seconds(Collective::kAllGather), 1e-3);
  EXPECT_DOUBLE_EQ(seconds(Collective::kReduceScatter), 2e-3);
  EXPECT_DOUBLE_EQ(seconds(Collective::kAllReduce), 3e-3);
}

TEST(CostModelTest, BytesSentAreThoseOfAllOtherPieces) {
  const CostModel model = Create(OneLevel(0, 1), 8);
  EXPECT_EQ(model.BytesSent(Collective::kAllGather, {8, 1}, 800), 700);
  EXPECT_EQ(model.BytesSent(Collective::kReduceScatter, {8, 1}, 800), 700);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {8, 1}, 800), 1400);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {8, 1}, 793), 1400);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {1, 1}, 800), 0);
}

TEST(CostModelTest, InSharedMemoryAnAllGatherIsAFence) {
  CostOptions options = TwoLevels();
  options.shared_memory = true;
  options.fence_seconds = 2e-6;
  const CostModel model = Create(options, 32);
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kAllGather, {8, 1}, 8000000), 2e-6);
  EXPECT_EQ(model.BytesSent(Collective::kAllGather, {8, 1}, 8000000), 0);
  // A rank reads all pieces and writes one.
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kReduceScatter, {8, 1}, 8000000),
      2e-6 + 9e6 / 1e9);
  // Other hosts' pieces come over the network.
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kAllGather, {32, 1}, 32000000),
      2e-6 + 3 * (10e-6 + 8e6 / 50e9));
  EXPECT_EQ(model.BytesSent(Collective::kAllGather, {32, 1}, 32000000),
            3000000);
}

TEST(CostModelTest, RanksShareCoresAndMemoryOfTheirHost) {
  CostOptions options = OneLevel(0, 1);
  options.cores = 2;
  options.optimizer_bandwidth = 2e9;
  EXPECT_DOUBLE_EQ(Create(options, 1).ComputeSeconds({0, 1}), 1);
  EXPECT_DOUBLE_EQ(Create(options, 2).ComputeSeconds({0, 1}), 1);
  EXPECT_DOUBLE_EQ(Create(options, 3).ComputeSeconds({0, 1}), 1.5);
  options.threads = 2;
  const CostModel model = Create(options, 3);
  EXPECT_DOUBLE_EQ(model.ComputeSeconds({1e12, 1}), 6);
  EXPECT_DOUBLE_EQ(model.CopySeconds(1e9), 3);
  EXPECT_DOUBLE_EQ(model.OptimizerSeconds(1e9), 1.5);
  options.host_memory_bandwidth = 0.3e9;
  EXPECT_DOUBLE_EQ(Create(options, 3).CopySeconds(1e9), 10);
}

TEST(CostModelTest, RefusesWhatHasNoMeaning) {
  const auto refusal = [](void (*change)(CostOptions&), int ranks = 64) {
    CostOptions options = TwoLevels();
    change(options);
    return CostModel::Create(options, ranks).status();
  };
  const auto is_refused = [](const char* text) {
    return StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_OK(refusal([](CostOptions&) {}));
  EXPECT_THAT(refusal([](CostOptions&) {}, 0), is_refused("ranks is 0"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.flops_per_second = 0; }),
              is_refused("rate of compute is 0"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.memory_bandwidth = -1; }),
              is_refused("memory bandwidth is -1"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.levels[1].latency = -1; }),
              is_refused("latency of network level 1"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.levels[0].bandwidth = 0; }),
              is_refused("bandwidth of network level 0"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.levels[0].members = 0; }),
              is_refused("members of network level 0"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.levels[1].members = 4; }),
              is_refused("room for 32 ranks, not for 64"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.levels.clear(); }),
              is_refused("no level"));
  EXPECT_THAT(refusal([](CostOptions& o) {
                o.shared_memory = true;
                o.algorithm = Algorithm::kRing;
              }),
              is_refused("no ring"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.threads = 0; }),
              is_refused("threads of a rank is 0"));
  EXPECT_THAT(refusal([](CostOptions& o) {
                o.memory_bandwidth = std::numeric_limits<double>::quiet_NaN();
              }),
              is_refused("nan"));
}

TEST(CostModelTest, InfiniteRatesTakeNoTime) {
  CostOptions options = OneLevel(0, std::numeric_limits<double>::infinity());
  options.memory_bandwidth = options.flops_per_second =
      std::numeric_limits<double>::infinity();
  const CostModel model = Create(options, 16);
  for (const Collective collective :
       {Collective::kAllGather, Collective::kReduceScatter,
        Collective::kAllReduce}) {
    EXPECT_EQ(model.CollectiveSeconds(collective, {16, 1}, 1 << 30), 0);
  }
  EXPECT_EQ(model.CopySeconds(1e12), 0);
  EXPECT_EQ(model.OptimizerSeconds(1e12), 0);
  EXPECT_EQ(model.ComputeSeconds({1e15, 0.5}), 0.5);
}

}  // namespace
}  // namespace fsdp::simulator
