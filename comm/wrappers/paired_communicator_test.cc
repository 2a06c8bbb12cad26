#include "comm/wrappers/paired_communicator.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/recording_communicator.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

absl::StatusOr<Group> CreatePairedGroup(int world_size,
                                        absl::Duration timeout) {
  FSDP_ASSIGN_OR_RETURN(Group hosts, CreateLocalGroup(world_size, {timeout}));
  FSDP_ASSIGN_OR_RETURN(Group devices, CreateLocalGroup(world_size, {timeout}));
  Group group;
  for (int rank = 0; rank < world_size; ++rank) {
    FSDP_ASSIGN_OR_RETURN(auto pair,
                          CreatePairedCommunicator(std::move(hosts[rank]),
                                                   std::move(devices[rank])));
    group.push_back(std::move(pair));
  }
  return group;
}

// Returns a rank of `world_size` on the fake device.
std::unique_ptr<Communicator> DeviceRank(int world_size) {
  FakeDevice::Register();
  LoopbackOptions options;
  options.place.world_size = world_size;
  options.device = FakeDevice::device();
  return CreateLoopback(options).value();
}

at::Tensor Zeros(bool is_host) {
  return at::zeros({4}, at::TensorOptions(at::kFloat)
                            .device(is_host ? at::kCPU : FakeDevice::device()));
}

INSTANTIATE_TEST_SUITE_P(Paired, CommunicatorContract,
                         ::testing::Values(ContractBackend{"paired",
                                                           CreatePairedGroup}),
                         BackendName);

TEST(PairedCommunicatorTest, EachCollectiveGoesWhereItsTensorsAre) {
  CollectiveLog logs[2];
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  ASSERT_OK_AND_ASSIGN(
      auto pair, CreatePairedCommunicator(Record(std::move(hosts[0]), &logs[1]),
                                          Record(DeviceRank(1), &logs[0])));
  for (const bool is_host : {false, true}) {
    const at::Tensor a = Zeros(is_host);
    const at::Tensor b = Zeros(is_host);
    EXPECT_OK(Finish(pair->AllGather(a, b, "w")));
    EXPECT_OK(Finish(pair->ReduceScatter(a, b, ReduceOp::kSum, "w")));
    EXPECT_OK(Finish(pair->ReduceScatterScaled(a, b, {0.5, true}, "w")));
    EXPECT_OK(Finish(pair->AllToAll(a, b, "w")));
    EXPECT_OK(Finish(pair->AllReduce(a, ReduceOp::kMax, "w")));
    EXPECT_OK(Finish(pair->Broadcast(a, 0, "w")));
    EXPECT_EQ(logs[0].Trace().size(), 6);
    EXPECT_EQ(logs[1].Trace().size(), is_host ? 6 : 0);
  }
}

TEST(PairedCommunicatorTest, AFailureOfOneBackendEndsTheOther) {
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(2));
  ASSERT_OK_AND_ASSIGN(Group devices, CreateLocalGroup(2));
  ASSERT_OK_AND_ASSIGN(
      auto pair,
      CreatePairedCommunicator(std::move(hosts[0]), std::move(devices[0])));
  auto work = pair->AllReduce(Zeros(true), ReduceOp::kSum, "host");
  ASSERT_OK(work);
  EXPECT_THAT((*work)->Wait(absl::InfinitePast()),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("host")));
  // The other rank's side of the device hears of it.
  EXPECT_THAT(
      Finish(devices[1]->AllReduce(Zeros(true), ReduceOp::kSum, "device")),
      StatusIs(absl::StatusCode::kAborted, HasSubstr("all-reduce #0 of host")));
}

TEST(PairedCommunicatorTest, NamesBothBackends) {
  ASSERT_OK_AND_ASSIGN(const Group group,
                       CreatePairedGroup(1, absl::Seconds(30)));
  EXPECT_EQ(group[0]->ToString(),
            "on the host local, rank 0 of 1; on the device local, rank 0 of 1");
}

TEST(PairedCommunicatorTest, RefusesBackendsOfOtherRanks) {
  absl::StatusOr<Group> two = CreateLocalGroup(2);
  absl::StatusOr<Group> three = CreateLocalGroup(3);
  ASSERT_OK(two);
  ASSERT_OK(three);
  EXPECT_THAT(
      CreatePairedCommunicator(std::move((*two)[1]), std::move((*three)[1])),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("rank 1 of 2 and local, rank 1 of 3")));
  EXPECT_THAT(CreatePairedCommunicator(nullptr, std::move((*three)[0])),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("one of them is missing")));
}

}  // namespace
}  // namespace fsdp::comm::testing
