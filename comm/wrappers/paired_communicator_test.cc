#include "comm/wrappers/paired_communicator.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/recording_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

// The host takes odd counts.
bool IsOdd(const at::Tensor& tensor) { return tensor.numel() % 2 == 1; }

absl::StatusOr<Group> CreatePairedGroup(int world_size, absl::Duration timeout,
                                        const TakesHost& takes_host = IsOdd) {
  FSDP_ASSIGN_OR_RETURN(Group hosts, CreateLocalGroup(world_size, {timeout}));
  FSDP_ASSIGN_OR_RETURN(Group devices, CreateLocalGroup(world_size, {timeout}));
  Group group;
  for (int rank = 0; rank < world_size; ++rank) {
    FSDP_ASSIGN_OR_RETURN(auto pair, CreatePairedCommunicator(
                                         std::move(hosts[rank]),
                                         std::move(devices[rank]), takes_host));
    group.push_back(std::move(pair));
  }
  return group;
}

at::Tensor Zeros(int64_t size) {
  return at::zeros({size}, at::TensorOptions().dtype(at::kFloat));
}

INSTANTIATE_TEST_SUITE_P(Paired, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "paired",
                             [](int world_size, absl::Duration timeout) {
                               return CreatePairedGroup(world_size, timeout);
                             }}),
                         BackendName);

TEST(PairedCommunicatorTest, TensorsOfTheCpuGoToTheHost) {
  CollectiveLog host_log;
  CollectiveLog device_log;
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  ASSERT_OK_AND_ASSIGN(Group devices, CreateLocalGroup(1));
  ASSERT_OK_AND_ASSIGN(
      auto pair,
      CreatePairedCommunicator(Record(std::move(hosts[0]), &host_log),
                               Record(std::move(devices[0]), &device_log)));
  EXPECT_OK(Finish(pair->AllReduce(Zeros(3), ReduceOp::kSum, "loss")));
  EXPECT_EQ(host_log.TotalsOf(Collective::kAllReduce, "loss").count, 1);
  EXPECT_TRUE(device_log.Trace().empty());
}

TEST(PairedCommunicatorTest, EachCollectiveGoesWhereThePredicateSays) {
  CollectiveLog logs[2];
  ASSERT_OK_AND_ASSIGN(Group hosts, CreateLocalGroup(1));
  ASSERT_OK_AND_ASSIGN(Group devices, CreateLocalGroup(1));
  ASSERT_OK_AND_ASSIGN(
      auto pair,
      CreatePairedCommunicator(Record(std::move(hosts[0]), &logs[1]),
                               Record(std::move(devices[0]), &logs[0]), IsOdd));
  for (int64_t size : {4, 5}) {
    const at::Tensor a = Zeros(size);
    const at::Tensor b = Zeros(size);
    EXPECT_OK(Finish(pair->AllGather(a, b, "w")));
    EXPECT_OK(Finish(pair->ReduceScatter(a, b, ReduceOp::kSum, "w")));
    EXPECT_OK(Finish(pair->ReduceScatterScaled(a, b, {0.5, true}, "w")));
    EXPECT_OK(Finish(pair->AllToAll(a, b, "w")));
    EXPECT_OK(Finish(pair->AllReduce(a, ReduceOp::kMax, "w")));
    EXPECT_OK(Finish(pair->Broadcast(a, 0, "w")));
    EXPECT_EQ(logs[size % 2].Trace().size(), 6);
    EXPECT_EQ(logs[1 - size % 2].Trace().size(), size == 4 ? 0 : 6);
  }
}

TEST(PairedCommunicatorTest, AFailureOfOneBackendEndsTheOther) {
  ASSERT_OK_AND_ASSIGN(const Group group,
                       CreatePairedGroup(2, absl::Seconds(30)));
  auto peers = group[1]->AllReduce(Zeros(4), ReduceOp::kSum, "device");
  auto work = group[0]->AllReduce(Zeros(3), ReduceOp::kSum, "host");
  ASSERT_OK(work);
  EXPECT_THAT((*work)->Wait(absl::InfinitePast()),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("host")));
  EXPECT_THAT(Finish(std::move(peers)),
              StatusIs(absl::StatusCode::kAborted,
                       HasSubstr("device on rank 1 of 2: rank 0 aborted")));
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
