// Steps on a device with streams, as one of N ranks: values equal those on the
// CPU, streams leave nothing unordered, and the host does not wait.

#include "base/testing/fake_device.h"
#include "comm/testing/loopback_communicator.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/testing/device_programs.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using ::testing::ContainsRegex;
using ::testing::Not;

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

class DeviceTrainingTest
    : public ::testing::TestWithParam<std::tuple<DeviceProgram, int>> {
 protected:
  // The device must be registered before the first backward, which is the
  // CPU's: autograd counts kinds of devices only once.
  static void SetUpTestSuite() { FakeDevice::Register(); }
};

TEST_P(DeviceTrainingTest, StreamsAreOrderedAndTheHostWaitsForNothing) {
  const auto& [program, world_size] = GetParam();
  const absl::StatusOr<Values> expected =
      TrainOnDevice(program, world_size, TrainingDevice());
  ASSERT_OK(expected.status());
  std::vector<std::string> waits;
  const TrainingDevice fake = Fake(waits);
  FakeDevice::Reset();
  const absl::StatusOr<Values> actual =
      TrainOnDevice(program, world_size, fake);
  ASSERT_OK(actual.status());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  if (!program.looks_at_values) {
    EXPECT_THAT(waits, IsEmpty());
  }
  // The last bits of a matrix product depend on where its factors lie.
  const double tolerance = program.is_coarse ? 1e-2 : 1e-7;
  for (const auto& [name, value] : *expected) {
    EXPECT_TRUE(at::allclose(actual->at(name), value, 1e-5, tolerance))
        << name << ": " << actual->at(name) - value;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, DeviceTrainingTest,
    ::testing::Combine(::testing::ValuesIn(DevicePrograms()),
                       ::testing::Values(1, 2, 3, 5)),
    [](const auto& info) { return NameOfCase(info.param); });

TEST(OffloadedDeviceTest, SteppedOnTheHostHasTheBitsOfAnOptimizerOnTheCpu) {
  std::vector<std::string> waits;
  const auto different =
      fsdp::testing::DifferencesFromStepsOnTheCpu(Fake(waits));
  ASSERT_OK(different);
  EXPECT_THAT(*different, IsEmpty());
}

absl::StatusOr<std::string> DescribeOffloaded(const OffloadOptions& offload) {
  comm::LoopbackOptions loopback;
  loopback.device = FakeDevice::device();
  FSDP_ASSIGN_OR_RETURN(std::shared_ptr<comm::Communicator> world,
                        comm::CreateLoopback(loopback));
  const std::shared_ptr<NetImpl> net = MakeNet(/*dim=*/6, /*num_blocks=*/3);
  FakeDevice::Move(net->parameters());
  Options options = BlockUnits();
  options.offload = offload;
  FSDP_ASSIGN_OR_RETURN(const auto model, FullyShard(net, world, options));
  return model->Describe();
}

TEST(OffloadedDeviceTest, TellsWhetherItsMemoryIsLockedAndWhatSteps) {
  FakeDevice::Register();
  OffloadOptions offload;
  offload.optimizer = Tier::kCpu;
  offload.step_on = StepOn::kFaster;
  absl::StatusOr<std::string> text = DescribeOffloaded(offload);
  ASSERT_OK(text.status());
  EXPECT_THAT(*text, HasSubstr("memory for copies of privateuseone:0: locked"));
  EXPECT_THAT(*text, ContainsRegex("stepped by the (host|device): up .* GB/s"));
  offload.lock_pages = false;
  offload.step_on = StepOn::kDevice;
  text = DescribeOffloaded(offload);
  ASSERT_OK(text.status());
  EXPECT_THAT(*text, HasSubstr(": not locked, the host waits for copies"));
  EXPECT_THAT(*text, Not(HasSubstr("stepped by")));
}

}  // namespace
}  // namespace fsdp::testing
