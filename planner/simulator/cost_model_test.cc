#include <cstdint>
#include <limits>

#include "base/testing/status_matchers.h"
#include "planner/simulator/simulator.h"

namespace fsdp::simulator {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

CostOptions OneHost(double latency, double bandwidth) {
  CostOptions options;
  options.flops_per_second = 1e12;
  options.memory_bandwidth = 1e9;
  options.host = {latency, bandwidth};
  return options;
}

CostOptions HostsOf8() {
  CostOptions options = OneHost(1e-6, 100e9);
  options.ranks_per_host = 8;
  options.network = {10e-6, 50e9};
  return options;
}

CostModel Create(const CostOptions& options, int ranks) {
  absl::StatusOr<CostModel> model = CostModel::Create(options, ranks);
  EXPECT_OK(model);
  return *model;
}

TEST(CostModelTest, ARingPassesAllPiecesButOnesOwn) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const CostModel model = Create(OneHost(1e-3, 1e6), ranks);
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

TEST(CostModelTest, HierarchyExchangesBetweenHostsAndThenInside) {
  const CostModel model = Create(HostsOf8(), 32);
  // 8 ranks of a host share its link; inside, each piece stands for 4 hosts.
  const double piece = 1e6;
  const double between = 3 * (10e-6 + 8 * piece / 50e9);
  const double inside = 7 * (1e-6 + 4 * piece / 100e9);
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kAllGather, {32, 1}, 32000000),
      between + inside);
  // A group has one rank of each host: 8 rings share the host's link.
  EXPECT_DOUBLE_EQ(
      model.CollectiveSeconds(Collective::kAllGather, {4, 8}, 4000000),
      between);
}

TEST(CostModelTest, GroupsInsideAHostDoNotUseTheNetwork) {
  CostOptions slow = HostsOf8();
  slow.network = {1, 1};
  EXPECT_EQ(
      Create(slow, 32).CollectiveSeconds(Collective::kAllReduce, {8, 1}, 8000),
      Create(HostsOf8(), 8)
          .CollectiveSeconds(Collective::kAllReduce, {8, 1}, 8000));
}

TEST(CostModelTest, ReductionsMayHaveABandwidthOfTheirOwn) {
  CostOptions options = OneHost(0, 1e6);
  options.host.reduce_bandwidth = 5e5;
  const CostModel model = Create(options, 2);
  const auto seconds = [&](Collective collective) {
    return model.CollectiveSeconds(collective, {2, 1}, 2000);
  };
  EXPECT_DOUBLE_EQ(seconds(Collective::kAllGather), 1e-3);
  EXPECT_DOUBLE_EQ(seconds(Collective::kReduceScatter), 2e-3);
  EXPECT_DOUBLE_EQ(seconds(Collective::kAllReduce), 3e-3);
}

TEST(CostModelTest, BytesSentAreThoseOfAllOtherPieces) {
  const CostModel model = Create(OneHost(0, 1), 8);
  EXPECT_EQ(model.BytesSent(Collective::kAllGather, {8, 1}, 800), 700);
  EXPECT_EQ(model.BytesSent(Collective::kReduceScatter, {8, 1}, 800), 700);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {8, 1}, 800), 1400);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {8, 1}, 793), 1400);
  EXPECT_EQ(model.BytesSent(Collective::kAllReduce, {1, 1}, 800), 0);
}

TEST(CostModelTest, InSharedMemoryAnAllGatherIsAFence) {
  CostOptions options = HostsOf8();
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

TEST(CostModelTest, RefusesWhatHasNoMeaning) {
  const auto refusal = [](void (*change)(CostOptions&), int ranks = 64) {
    CostOptions options = HostsOf8();
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
  EXPECT_THAT(refusal([](CostOptions& o) { o.ranks_per_host = -1; }),
              is_refused("ranks per host is -1: it cannot be negative"));
  EXPECT_THAT(refusal([](CostOptions& o) { o.host.latency = -1; }),
              is_refused("latency on a host is -1"));
  EXPECT_THAT(
      refusal([](CostOptions& o) { o.network.bandwidth = 0; }),
      is_refused("bandwidth between hosts is 0: it has to be positive"));
  EXPECT_OK(refusal([](CostOptions& o) { o.network.bandwidth = 0; }, 8));
  EXPECT_THAT(refusal([](CostOptions& o) {
                o.memory_bandwidth = std::numeric_limits<double>::quiet_NaN();
              }),
              is_refused("nan"));
}

TEST(CostModelTest, InfiniteRatesTakeNoTime) {
  CostOptions options = OneHost(0, std::numeric_limits<double>::infinity());
  options.memory_bandwidth = options.flops_per_second =
      std::numeric_limits<double>::infinity();
  const CostModel model = Create(options, 16);
  for (const Collective collective :
       {Collective::kAllGather, Collective::kReduceScatter,
        Collective::kAllReduce}) {
    EXPECT_EQ(model.CollectiveSeconds(collective, {16, 1}, 1 << 30), 0);
  }
  EXPECT_EQ(model.MemorySeconds(1e12), 0);
  EXPECT_EQ(model.ComputeSeconds({1e15, 0.5}), 0.5);
}

}  // namespace
}  // namespace fsdp::simulator
