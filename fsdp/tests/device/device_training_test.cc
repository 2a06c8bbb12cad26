// Steps on a device with streams, as one of N ranks: values equal those on the
// CPU, streams leave nothing unordered, and the host does not wait. Units ask
// for few device calls, and the memory of dropped gradients is freed.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "base/testing/fake_device.h"
#include "comm/testing/loopback_communicator.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/device_programs.h"
#include "offload/param_store.h"

namespace fsdp::testing {
namespace {

// Sets `waits` to the device's reports on all steps but the first.
TrainingDevice Fake(std::vector<std::string>& waits) {
  FakeDevice::Register();
  TrainingDevice fake;
  fake.device = FakeDevice::device();
  fake.move = [](torch::nn::Module& module) {
    FakeDevice::Move(module.parameters());
  };
  fake.begin = &FakeDevice::Reset;
  fake.end = [&waits] { waits = FakeDevice::HostWaits(); };
  return fake;
}

void ExpectTheValuesOfTheCpu(const DeviceProgram& program, int world_size) {
  ASSERT_OK_AND_ASSIGN(const Values expected,
                       TrainOnDevice(program, world_size, TrainingDevice()));
  std::vector<std::string> waits;
  const TrainingDevice fake = Fake(waits);
  FakeDevice::Reset();
  ASSERT_OK_AND_ASSIGN(const Values actual,
                       TrainOnDevice(program, world_size, fake));
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  if (!program.looks_at_values) {
    EXPECT_THAT(waits, IsEmpty());
  }
  // The last bits of a matrix product depend on where its factors lie.
  const double tolerance = program.is_coarse ? 1e-2 : 1e-7;
  for (const auto& [name, value] : expected) {
    EXPECT_TRUE(at::allclose(actual.at(name), value, 1e-5, tolerance))
        << name << ": " << actual.at(name) - value;
  }
}

// What is deferred and what is small enough to be made are on one device.
TEST(DeferredOnADeviceTest, ADeviceWithoutAnIndexIsTheCurrentOne) {
  FakeDevice::Register();
  const DeferredInit deferred;
  const c10::Device device(FakeDevice::device().type());
  EXPECT_EQ(torch::empty({1024, 1024}, device).device(), FakeDevice::device());
}

class DeviceTrainingTest
    : public ::testing::TestWithParam<std::tuple<DeviceProgram, int>> {
 protected:
  // The device must be registered before the first backward, which is the
  // CPU's: autograd counts kinds of devices only once.
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_P(DeviceTrainingTest, StreamsAreOrderedAndTheHostWaitsForNothing) {
  const auto& [program, world_size] = GetParam();
  ExpectTheValuesOfTheCpu(program, world_size);
}

INSTANTIATE_TEST_SUITE_P(
    All, DeviceTrainingTest,
    ::testing::Combine(::testing::ValuesIn(DevicePrograms()),
                       ::testing::Values(1, 2, 3, 5)),
    [](const auto& info) { return NameOfCase(info.param); });

// Units run again in backward, by arguments that have left the device.
TEST(OffloadedDeviceTest, RecomputedUnitsReadTheirArgumentsInOrder) {
  FakeDevice::Register();
  for (const int64_t window : {int64_t{0}, SmallOptions().window_bytes}) {
    std::shared_ptr<ActivationOffload> activations;
    DeviceProgram program;
    program.configure = [&](Options& options) {
      ActivationOffloadOptions offload = SmallOptions();
      offload.window_bytes = window;
      activations = ActivationOffload::MakeInHostMemory(
                        16 * offload::kPageBytes, FakeDevice::device(), offload)
                        .value();
      options.recompute.units = options.wrap_policy;
      options.recompute.options.offload = activations;
    };
    for (const int world_size : {1, 2, 3}) {
      ExpectTheValuesOfTheCpu(program, world_size);
      const ActivationOffloadStats stats = activations->stats();
      EXPECT_EQ(stats.failed, 0);
      // Three blocks have one argument each, in each of three steps.
      EXPECT_EQ(stats.tensors_out, 9);
    }
  }
}

TEST(OffloadedDeviceTest, SteppedOnTheHostHasTheBitsOfAnOptimizerOnTheCpu) {
  std::vector<std::string> waits;
  ASSERT_OK_AND_ASSIGN(const auto different,
                       DifferencesFromStepsOnTheCpu(Fake(waits)));
  EXPECT_THAT(different, IsEmpty());
}

absl::StatusOr<std::string> DescribeOffloaded(const OffloadOptions& offload) {
  comm::LoopbackOptions loopback;
  loopback.device = FakeDevice::device();
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<Communicator> world,
                        comm::CreateLoopback(loopback));
  const std::shared_ptr<NetImpl> net = MakeNet(/*dim=*/6, /*num_blocks=*/3);
  FakeDevice::Move(net->parameters());
  Options options = BlockUnits();
  options.offload = offload;
  FSDP_ASSIGN_OR_RETURN(const auto model, FullyShard(net, world, options));
  return model->Describe();
}

TEST(OffloadedDeviceTest, TellsWhetherItsMemoryIsLocked) {
  FakeDevice::Register();
  OffloadOptions offload;
  offload.optimizer = Tier::kCpu;
  EXPECT_THAT(DescribeOffloaded(offload).value(),
              HasSubstr("memory for copies of privateuseone:0: locked"));
  offload.lock_pages = false;
  EXPECT_THAT(DescribeOffloaded(offload).value(),
              HasSubstr(": not locked, the host waits for copies"));
}

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
  FSDP_ASSIGN_OR_RETURN(auto world, OneOf(world_size, FakeDevice::device()));
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
    const Setting setting = {
        "", 1, [&](Options& options) { options.unit.strategy = strategy; }};
    ASSERT_OK_AND_ASSIGN(const Calls added, AddedByUnits(setting));
    EXPECT_LE(added.operators, 0);
    EXPECT_LE(added.allocations, 0);
    EXPECT_LE(added.stream_switches, 0);
    EXPECT_LE(added.events_recorded, 0);
    EXPECT_LE(added.event_waits, 0);
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
    ASSERT_OK_AND_ASSIGN(const Calls added, AddedByUnits(setting));
    EXPECT_LE(Sum(added), limit * kMoreBlocks)
        << setting.name << " of " << setting.world_size << ": "
        << ToString(added) << ", of " << kMoreBlocks << " units";
  }
}

using Model = FullyShardedDataParallel<NetImpl>;

absl::StatusOr<Model> MakeModel(int world_size, c10::Device device) {
  FSDP_ASSIGN_OR_RETURN(auto world, OneOf(world_size, device));
  std::shared_ptr<NetImpl> net = MakeNet(kDim, /*num_blocks=*/3);
  if (!device.is_cpu()) FakeDevice::Move(net->parameters());
  // Shards and gradients are float, and so are the buffers that become
  // gradients on one rank.
  Options options = BlockUnits();
  options.unit.precision.param_dtype = at::kBFloat16;
  options.unit.precision.reduce_dtype = at::kFloat;
  return FullyShard(std::move(net), std::move(world), options);
}

// Tells whether a tensor's memory is still there, without keeping it.
using Memory = c10::weak_intrusive_ptr<c10::StorageImpl>;

std::vector<Memory> GradientsOf(const Model& model) {
  std::vector<Memory> memory;
  for (const TensorRange& named : model->Ranges()) {
    const at::Tensor& gradient = named.values.grad();
    if (!gradient.defined()) continue;
    memory.emplace_back(gradient.storage().getWeakStorageImpl());
  }
  return memory;
}

int NumHeld(const std::vector<Memory>& memory) {
  int held = 0;
  for (const Memory& each : memory) held += each.expired() ? 0 : 1;
  return held;
}

class GradientMemoryTest : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
  void SetUp() override { FakeDevice::Reset(); }
};

TEST_P(GradientMemoryTest, OfADeviceIsTheForwardsOnceTheyAreDropped) {
  ASSERT_OK_AND_ASSIGN(auto model, MakeModel(GetParam(), FakeDevice::device()));
  FusedAdamW optimizer(model->Parameters(), {});
  const at::Tensor x = Rows(0, 3, kDim).to(FakeDevice::device());
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
    optimizer.step();
    const std::vector<Memory> memory = GradientsOf(model);
    ASSERT_FALSE(memory.empty());
    // The next backward adds to gradients that the user has not dropped.
    ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
    EXPECT_EQ(NumHeld(memory), memory.size());
    optimizer.zero_grad();
    const at::Tensor loss = Loss(model->forward(x), x);
    EXPECT_EQ(NumHeld(memory), 0) << i;
    ASSERT_OK(model->Backward(loss));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

// On the CPU, new memory would cost page faults.
TEST_P(GradientMemoryTest, OfTheCpuIsKeptForTheNextStep) {
  ASSERT_OK_AND_ASSIGN(Model model, MakeModel(GetParam(), at::kCPU));
  const at::Tensor x = Rows(0, 3, kDim);
  ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
  const std::vector<Memory> memory = GradientsOf(model);
  model->zero_grad();
  ASSERT_OK(model->Backward(Loss(model->forward(x), x)));
  EXPECT_EQ(NumHeld(memory), memory.size());
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, GradientMemoryTest,
                         ::testing::Values(1, 2, 3, 5));

}  // namespace
}  // namespace fsdp::testing
