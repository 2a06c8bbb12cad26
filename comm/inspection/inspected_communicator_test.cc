#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/communicator.h"
#include "comm/inspection/flight_recorder.h"
#include "comm/inspection/inspector.h"
#include "comm/inspection/peer_records.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/connect_ranks.h"
#include "comm/testing/loopback_communicator.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::SizeIs;

std::shared_ptr<Inspector> Alone() {
  return Inspector::Start({}, /*peers=*/nullptr).value();
}

Group Inspected(Group group,
                std::vector<std::shared_ptr<Inspector>>* inspectors = nullptr) {
  for (auto& ranks : group) {
    auto inspector = Alone();
    if (inspectors != nullptr) inspectors->push_back(inspector);
    ranks = Inspect(std::move(ranks), std::move(inspector));
  }
  return group;
}

ContractBackend OverLocal() {
  return {"local",
          [](int world_size, absl::Duration timeout) -> absl::StatusOr<Group> {
            FSDP_ASSIGN_OR_RETURN(Group group,
                                  CreateLocalGroup(world_size, {timeout}));
            return Inspected(std::move(group));
          }};
}

INSTANTIATE_TEST_SUITE_P(Inspected, CommunicatorContract,
                         ::testing::Values(OverLocal()), BackendName);

RankRecord RecordOf(const Inspector& inspector) {
  return inspector.recorder().Read(absl::GetCurrentTimeNanos());
}

std::vector<std::string> Names(const Inspector& inspector) {
  std::vector<std::string> names;
  for (const OperationRecord& operation : RecordOf(inspector).operations) {
    names.push_back(NameOf(operation));
  }
  return names;
}

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

absl::Status AllKinds(Communicator& ranks) {
  const int64_t n = ranks.world_size();
  const at::Tensor whole = at::zeros({4 * n});
  const at::Tensor other = at::zeros({4 * n});
  const at::Tensor part = at::ones({4});
  const auto finish = [](absl::StatusOr<std::unique_ptr<Work>> work) {
    return work.ok() ? (*work)->Wait(Soon()) : work.status();
  };
  FSDP_RETURN_IF_ERROR(finish(ranks.AllGather(whole, part, "blocks.0")));
  FSDP_RETURN_IF_ERROR(
      finish(ranks.ReduceScatter(part, whole, ReduceOp::kSum, "blocks.1")));
  FSDP_RETURN_IF_ERROR(
      finish(ranks.ReduceScatterScaled(part, whole, {0.5}, "blocks.2")));
  FSDP_RETURN_IF_ERROR(finish(ranks.AllToAll(other, whole, "experts")));
  FSDP_RETURN_IF_ERROR(finish(ranks.AllReduce(part, ReduceOp::kMax, "loss")));
  return finish(ranks.Broadcast(part, 0, "step"));
}

TEST(InspectedCommunicatorTest, RecordsWhatEachRankCalls) {
  std::vector<std::shared_ptr<Inspector>> inspectors;
  ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(2));
  group = Inspected(std::move(group), &inspectors);
  EXPECT_OK(AllOk(RunRanks(group, AllKinds)));
  for (const auto& inspector : inspectors) {
    EXPECT_THAT(
        Names(*inspector),
        ::testing::ElementsAre(
            "all-gather #0 of blocks.0", "reduce-scatter #1 of blocks.1",
            "reduce-scatter #2 of blocks.2", "all-to-all #3 of experts",
            "all-reduce #4 of loss", "broadcast #5 of step"));
    const RankRecord record = RecordOf(*inspector);
    for (const OperationRecord& operation : record.operations) {
      EXPECT_EQ(operation.state, OperationState::kDone);
      EXPECT_EQ(operation.dtype, static_cast<int8_t>(at::kFloat));
      EXPECT_EQ(operation.bytes, operation.call < 4 ? 32 : 16);
      EXPECT_LT(0, operation.started_ns);
      EXPECT_LE(operation.started_ns, operation.waited_ns);
      EXPECT_LE(operation.waited_ns, operation.ended_ns);
      EXPECT_LE(operation.ended_ns, record.taken_ns);
    }
  }
}

// Ranks find the group of a call by an id that members alone share.
TEST(InspectedCommunicatorTest, PartsAreGroupsOfTheirOwn) {
  std::vector<std::shared_ptr<Inspector>> inspectors;
  ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(4));
  group = Inspected(std::move(group), &inspectors);
  EXPECT_OK(AllOk(RunRanks(group, [](Communicator& ranks) {
    FSDP_ASSIGN_OR_RETURN(auto pairs,
                          ranks.Split(ranks.rank() / 2, ranks.rank()));
    FSDP_ASSIGN_OR_RETURN(auto all, pairs->Split(0, ranks.rank()));
    FSDP_RETURN_IF_ERROR(AllKinds(*pairs));
    EXPECT_EQ(all->activity(), ranks.activity());
    return AllKinds(*all);
  })));
  std::vector<std::vector<GroupRecord>> groups;
  groups.reserve(4);
  for (const auto& inspector : inspectors) {
    groups.push_back(RecordOf(*inspector).groups);
    ASSERT_THAT(groups.back(), SizeIs(3));
    EXPECT_EQ(groups.back()[0].calls, 1);
    EXPECT_EQ(groups.back()[1].calls, 7);
    EXPECT_EQ(groups.back()[2].calls, 6);
  }
  for (const int part : {0, 1, 2}) {
    EXPECT_EQ(groups[0][part].id, groups[1][part].id);
    EXPECT_EQ(groups[2][part].id, groups[3][part].id);
    EXPECT_EQ(groups[0][part].id == groups[2][part].id, part == 0);
  }
  EXPECT_NE(groups[0][1].id, groups[0][2].id);
}

TEST(InspectedCommunicatorTest, NumbersAreThoseOfErrors) {
  ASSERT_OK_AND_ASSIGN(Group group, CreateSharedMemoryGroup(1));
  const auto inspector = Alone();
  const auto ranks = Inspect(std::move(group[0]), inspector);
  // Common memory takes numbers of its own.
  ASSERT_OK_AND_ASSIGN(CommonMemory common, ranks->AllocateCommon(64));
  const at::Tensor tensor = at::ones({4});
  ASSERT_OK_AND_ASSIGN(auto work,
                       ranks->AllReduce(tensor, ReduceOp::kSum, "sum"));
  common.fence->Arrive();
  EXPECT_OK(common.fence->Wait(Soon()));
  common.fence->Arrive();
  ranks->Abort(absl::InternalError("the disk is full"));
  const std::string error(
      ranks->AllReduce(tensor, ReduceOp::kSum, "sum").status().message());
  const std::vector<std::string> names = Names(*inspector);
  ASSERT_THAT(names, SizeIs(5));
  EXPECT_EQ(names[0], "allocation #0 of common memory");
  EXPECT_EQ(names[1], "all-reduce #2 of sum");
  EXPECT_EQ(names[2], "fence #1 of common memory");
  EXPECT_EQ(names[3], "fence #2 of common memory");
  EXPECT_THAT(error, ::testing::HasSubstr("all-reduce #3 of sum"));
  const RankRecord record = RecordOf(*inspector);
  EXPECT_EQ(record.operations[2].state, OperationState::kDone);
  EXPECT_EQ(record.operations[3].state, OperationState::kStarted);
  EXPECT_EQ(record.operations[4].state, OperationState::kFailed);
}

TEST(InspectedCommunicatorTest, WhatIsNotWaitedForIsDropped) {
  ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(1));
  const auto inspector = Alone();
  const auto ranks = Inspect(std::move(group[0]), inspector);
  EXPECT_OK(ranks->AllReduce(at::ones({4}), ReduceOp::kSum, "sum").status());
  EXPECT_EQ(RecordOf(*inspector).operations[0].state, OperationState::kDropped);
}

TEST(InspectedCommunicatorTest, OfADeviceTheStartIsKnown) {
  FakeDevice::Register();
  LoopbackOptions options;
  options.device = FakeDevice::device();
  const auto inspector = Alone();
  const auto ranks = Inspect(CreateLoopback(options).value(), inspector);
  EXPECT_TRUE(ranks->CanBeCaptured());
  const at::Tensor tensor =
      at::ones({4}, at::TensorOptions().device(FakeDevice::device()));
  ASSERT_OK_AND_ASSIGN(auto work,
                       ranks->AllReduce(tensor, ReduceOp::kSum, "sum"));
  EXPECT_OK(work->BlockCurrentStream());
  work.reset();
  EXPECT_EQ(RecordOf(*inspector).operations[0].state,
            OperationState::kOnDevice);
}

TEST(InspectedCommunicatorTest, APartOutlivesTheWhole) {
  ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(1));
  auto ranks = Inspect(std::move(group[0]), Alone());
  ASSERT_OK_AND_ASSIGN(auto part, ranks->Split(0, 0));
  ASSERT_OK_AND_ASSIGN(auto work,
                       part->AllReduce(at::ones({4}), ReduceOp::kSum, "sum"));
  ranks.reset();
  EXPECT_OK(work->Wait(Soon()));
  part.reset();
  work.reset();
}

}  // namespace
}  // namespace fsdp::comm::testing
