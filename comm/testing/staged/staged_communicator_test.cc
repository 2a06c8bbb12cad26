#include "comm/testing/staged/staged_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/local/local_communicator.h"
#include "comm/startup/environment.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/ranks_of_one_host.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::StatusOr<Group> Staged(absl::StatusOr<Group> hosts) {
  FSDP_RETURN_IF_ERROR(hosts.status());
  for (auto& rank : *hosts) {
    rank = CreateStagedCommunicator(std::move(rank), FakeDevice::device());
  }
  return hosts;
}

ContractBackend OnFakeDevice(std::string name, bool shares_memory) {
  FakeDevice::Register();
  ContractBackend backend;
  backend.name = std::move(name);
  backend.create = [shares_memory](int world_size, absl::Duration timeout) {
    return Staged(shares_memory ? CreateSharedMemoryGroup(world_size, timeout)
                                : CreateLocalGroup(world_size, {timeout}));
  };
  backend.device = FakeDevice::device();
  backend.begin = FakeDevice::Reset;
  backend.end = [] { EXPECT_THAT(FakeDevice::Races(), IsEmpty()); };
  return backend;
}

INSTANTIATE_TEST_SUITE_P(Staged, CommunicatorContract,
                         ::testing::Values(OnFakeDevice("OverLocal", false),
                                           OnFakeDevice("OverSharedMemory",
                                                        true)),
                         BackendName);

at::Tensor OnDevice(int64_t size, double value) {
  return at::full({size}, value, at::TensorOptions(FakeDevice::device()));
}

TEST(StagedCommunicatorTest, NeitherCallsNorStreamsMakeTheHostSynchronize) {
  FakeDevice::Register();
  FakeDevice::Reset();
  for (const int world_size : {1, 3}) {
    ASSERT_OK_AND_ASSIGN(const Group group,
                         Staged(CreateLocalGroup(world_size)));
    EXPECT_THAT(group[0]->ToString(),
                HasSubstr("staged on privateuseone:0 over local, rank 0 of"));
    const absl::Status status =
        AllOk(RunRanks(group, [&](Communicator& comm) -> absl::Status {
          const at::Tensor in = OnDevice(7, comm.rank());
          const at::Tensor out =
              at::empty({int64_t{7} * comm.world_size()}, in.options());
          for (int step = 0; step < 5; ++step) {
            in.add_(1);
            FSDP_ASSIGN_OR_RETURN(auto gathered, comm.AllGather(out, in, "w"));
            FSDP_RETURN_IF_ERROR(gathered->BlockCurrentStream());
            out.mul_(2);
            FSDP_ASSIGN_OR_RETURN(auto reduced, comm.ReduceScatterScaled(
                                                    in, out, {0.5, true}, "w"));
            FSDP_RETURN_IF_ERROR(reduced->BlockCurrentStream());
            in.div_(comm.world_size() + 1);
          }
          return absl::OkStatus();
        }));
    EXPECT_OK(status) << world_size;
  }
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

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
    EXPECT_THAT(
        RunInThreads(world_size,
                     [&](int rank) { return ConnectAndSum(ranks[rank]); }),
        ::testing::Each(::fsdp::testing::IsOk()));
    EXPECT_THAT(FakeDevice::Races(), ::testing::IsEmpty());
  }
}

}  // namespace
}  // namespace fsdp::comm::testing
