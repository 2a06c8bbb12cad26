#include "comm/staged/staged_backend.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/call.h"
#include "comm/communicator.h"
#include "comm/startup/bootstrap_socket.h"
#include "comm/startup/environment.h"
#include "comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::IsOk;
using ::fsdp::testing::StatusIs;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLimit = absl::Seconds(30);

// The environments of `world_size` ranks on this host.
std::vector<Environment> Ranks(int world_size) {
  Environment environment;
  environment.world_size = environment.local_world_size = world_size;
  environment.master_addr = "127.0.0.1";
  environment.master_port = Listen("127.0.0.1", 0)->port;
  std::vector<Environment> ranks(world_size, environment);
  for (int rank = 0; rank < world_size; ++rank) {
    ranks[rank].rank = ranks[rank].local_rank = rank;
  }
  return ranks;
}

absl::Status SumRanks(Communicator& communicator, c10::Device device) {
  const int n = communicator.world_size();
  const at::Tensor sum =
      at::full({5}, communicator.rank(),
               at::TensorOptions().dtype(at::kLong).device(device));
  FSDP_ASSIGN_OR_RETURN(auto work,
                        communicator.AllReduce(sum, ReduceOp::kSum, "ranks"));
  FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + kLimit));
  if (sum.sum().item<int64_t>() == 5 * n * (n - 1) / 2) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the sum of the ranks is wrong on ", device.str()));
}

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
    FSDP_RETURN_IF_ERROR(SumRanks(*group, c10::Device(c10::kCPU)));
  }
  return absl::OkStatus();
}

TEST(StagedBackendTest, RanksShareADeviceAndHaveTheHostBesides) {
  FakeDevice::Register();
  for (const int world_size : {1, 2, 3}) {
    FakeDevice::Reset();
    const std::vector<Environment> ranks = Ranks(world_size);
    std::vector<absl::Status> results(world_size);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back(
          [&, rank] { results[rank] = ConnectAndSum(ranks[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_THAT(results, Each(IsOk()));
    EXPECT_THAT(FakeDevice::Races(), IsEmpty());
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
