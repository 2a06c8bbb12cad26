// The device calls of a step, per unit, beyond those of the unsharded model,
// with everything on the device.

#include <ostream>

#include "base/testing/fake_device.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/testing/device_programs.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using Calls = FakeDevice::Calls;

constexpr int64_t kDim = 6;
constexpr int kWarmUp = 3;
constexpr int kMoreBlocks = 10;

std::string ToString(const Calls& calls) {
  return absl::StrCat(calls.operators, " operators, ", calls.allocations,
                      " allocations, ", calls.stream_switches,
                      " stream switches, ", calls.events_recorded,
                      " events recorded, ", calls.event_waits, " waited for");
}

int64_t Sum(const Calls& calls) {
  return calls.operators + calls.allocations + calls.stream_switches +
         calls.events_recorded + calls.event_waits;
}

Calls operator-(Calls a, const Calls& b) {
  a.operators -= b.operators;
  a.allocations -= b.allocations;
  a.stream_switches -= b.stream_switches;
  a.events_recorded -= b.events_recorded;
  a.event_waits -= b.event_waits;
  return a;
}

using Step = std::function<absl::Status()>;

absl::StatusOr<Calls> CallsOf(const Step& step) {
  for (int i = 0; i < kWarmUp; ++i) FSDP_RETURN_IF_ERROR(step());
  FakeDevice::Reset();
  FSDP_RETURN_IF_ERROR(step());
  return FakeDevice::calls();
}

std::shared_ptr<NetImpl> OnDevice(int blocks) {
  std::shared_ptr<NetImpl> net = MakeNet(kDim, blocks);
  FakeDevice::Move(net->parameters());
  return net;
}

absl::StatusOr<Calls> PlainCalls(int blocks) {
  const std::shared_ptr<NetImpl> net = OnDevice(blocks);
  FusedAdamW optimizer(net->parameters(), {});
  const at::Tensor x = Rows(0, 3, kDim).to(FakeDevice::device());
  return CallsOf([&]() -> absl::Status {
    Loss(net->forward(x), x).backward();
    optimizer.step();
    optimizer.zero_grad();
    return absl::OkStatus();
  });
}

absl::StatusOr<Calls> ShardedCalls(int blocks, int world_size,
                                   const Options& options) {
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        OneOf(world_size, FakeDevice::device()));
  FSDP_ASSIGN_OR_RETURN(auto model,
                        FullyShard(OnDevice(blocks), world, options));
  FusedAdamW optimizer(model->Parameters(), {});
  const at::Tensor x = Rows(0, 3, kDim).to(FakeDevice::device());
  return CallsOf([&]() -> absl::Status {
    FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
    optimizer.step();
    optimizer.zero_grad();
    return absl::OkStatus();
  });
}

struct Setting {
  std::string name;
  int world_size;
  std::function<void(Options&)> configure = [](Options&) {};
};

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << setting.name << " of " << setting.world_size;
}

// Returns the calls that `kMoreBlocks` more blocks add to a sharded model
// beyond those that they add to a plain one.
absl::StatusOr<Calls> AddedByUnits(const Setting& setting) {
  Options options = BlockUnits();
  setting.configure(options);
  Calls added[2];
  for (const int i : {0, 1}) {
    const int blocks = 2 + i * kMoreBlocks;
    FSDP_ASSIGN_OR_RETURN(const Calls plain, PlainCalls(blocks));
    FSDP_ASSIGN_OR_RETURN(const Calls sharded,
                          ShardedCalls(blocks, setting.world_size, options));
    added[i] = sharded - plain;
  }
  return added[1] - added[0];
}

class DeviceCallsTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_F(DeviceCallsTest, OneRankWithoutCastsAsksForNothingMore) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
        ShardingStrategy::kNoShard}) {
    const auto added = AddedByUnits(
        {"", 1, [&](Options& options) { options.unit.strategy = strategy; }});
    ASSERT_OK(added);
    EXPECT_LE(added->operators, 0);
    EXPECT_LE(added->allocations, 0);
    EXPECT_LE(added->stream_switches, 0);
    EXPECT_LE(added->events_recorded, 0);
    EXPECT_LE(added->event_waits, 0);
  }
}

// The figures are in docs/architecture.md.
TEST_F(DeviceCallsTest, CallsPerUnitAreNoMoreThanThose) {
  const auto in_bf16 = [](Options& options) {
    options.unit.precision.param_dtype = at::kBFloat16;
  };
  const std::pair<Setting, int> most[] = {
      {{"full shard", 1}, 0},
      {{"bf16", 1, in_bf16}, 24},
      {{"full shard", 2}, 47},
      {{"bf16", 2, in_bf16}, 52},
  };
  for (const auto& [setting, limit] : most) {
    const auto added = AddedByUnits(setting);
    ASSERT_OK(added);
    EXPECT_LE(Sum(*added), limit * kMoreBlocks)
        << ::testing::PrintToString(setting) << ": " << ToString(*added)
        << ", of " << kMoreBlocks << " units";
  }
}

}  // namespace
}  // namespace fsdp::testing
