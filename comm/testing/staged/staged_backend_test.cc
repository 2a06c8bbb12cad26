#include <c10/core/Device.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/ranks_of_one_host.h"
#include "comm/testing/staged/staged_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::RanksOfOneHost;
using ::fsdp::comm::testing::SumRanks;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::IsOk;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Seconds(30);

absl::Status ConnectAndSum(const Environment& environment) {
  ConnectOptions options;
  options.timeout = options.connect_timeout = kLimit;
  options.device = StagedBackend(c10::Device(c10::DeviceType::PrivateUse1));
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> world,
                        Connect(environment, options));
  FSDP_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> part,
                        world->Split(0, -world->rank()));
  for (Communicator* group : {world.get(), part.get()}) {
    FSDP_RETURN_IF_ERROR(SumRanks(*group, FakeDevice::device()));
    FSDP_RETURN_IF_ERROR(SumRanks(*group));
  }
  return absl::OkStatus();
}

TEST(StagedBackendTest, RanksShareADeviceAndHaveTheHostBesides) {
  FakeDevice::Register();
  for (const int world_size : {1, 2, 3}) {
    FakeDevice::Reset();
    const std::vector<Environment> ranks = RanksOfOneHost(world_size);
    std::vector<absl::Status> results(world_size);
    std::vector<std::thread> threads;
    threads.reserve(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back(
          [&, rank] { results[rank] = ConnectAndSum(ranks[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_THAT(results, ::testing::Each(IsOk()));
    EXPECT_THAT(FakeDevice::Races(), ::testing::IsEmpty());
  }
}

TEST(StagedBackendTest, ADeviceThatIsNotThereIsTold) {
  ConnectOptions options;
  options.device = StagedBackend(c10::Device(c10::kCUDA));
  EXPECT_THAT(Connect(Environment(), options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("without support for cuda devices")));
}

}  // namespace
}  // namespace fsdp::comm
