#include "comm/local/local_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/local/rendezvous.h"
#include "comm/testing/communicator_contract.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Code = absl::StatusCode;

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "local",
                             [](int world_size, absl::Duration timeout) {
                               return CreateLocalGroup(world_size, {timeout});
                             }}),
                         BackendName);

TEST(LocalCommunicatorTest, RefusesAGroupOfNobody) {
  EXPECT_THAT(CreateLocalGroup(0),
              StatusIs(Code::kInvalidArgument, HasSubstr("0 ranks")));
}

// What calls on one stream give, another one has after it has waited.
TEST(LocalCommunicatorTest, TheOnlyRankOnADeviceGetsWhatItHasPassed) {
  FakeDevice::Register();
  FakeDevice::Reset();
  LocalGroupOptions options;
  options.device = FakeDevice::device();
  ASSERT_OK_AND_ASSIGN(const auto whole, CreateLocalGroup(1, options));
  ASSERT_OK_AND_ASSIGN(const auto part, whole[0]->Split(0, 0));
  for (Communicator* const group : {whole[0].get(), part.get()}) {
    const auto fresh = [&] {
      return at::empty({6},
                       at::TensorOptions(at::kFloat).device(options.device));
    };
    const at::Tensor in = fresh().fill_(3);
    std::vector<std::unique_ptr<Work>> works;
    std::vector<at::Tensor> outs;
    for (int i = 0; i < 3; ++i) outs.push_back(fresh());
    const auto keep = [&works](StartedWork work) {
      ASSERT_OK(work);
      works.push_back(*std::move(work));
    };
    keep(group->AllGather(outs[0], in, "g"));
    keep(group->ReduceScatter(outs[1], in, ReduceOp::kSum, "r"));
    keep(group->AllToAll(outs[2], in, "a"));
    keep(group->AllReduce(in, ReduceOp::kMax, "m"));
    keep(group->Broadcast(in, 0, "b"));
    {
      const SideStream side(options.device);
      const SideStream::Scope scope(side);
      for (const auto& work : works) EXPECT_OK(work->BlockCurrentStream());
      for (at::Tensor& out : outs) out.add_(1);
    }
    for (const auto& work : works)
      EXPECT_OK(work->Wait(absl::InfiniteFuture()));
    Synchronize(options.device);
    for (const at::Tensor& out : outs) {
      EXPECT_TRUE(out.cpu().eq(4).all().item<bool>());
    }
    EXPECT_TRUE(in.cpu().eq(3).all().item<bool>());
    ASSERT_OK_AND_ASSIGN(const at::Tensor memory, group->AllocateSymmetric(64));
    EXPECT_EQ(memory.device(), options.device);
    EXPECT_THAT(group->Broadcast(at::zeros({2}), 0, "b"),
                StatusIs(Code::kUnimplemented,
                         HasSubstr("take privateuseone:0 tensors, not cpu")));
  }
  EXPECT_THAT(FakeDevice::Races(), ::testing::IsEmpty());
}

TEST(LocalCommunicatorTest, ADeviceThatIsNotDoneIsLate) {
  FakeDevice::Register();
  LocalGroupOptions options;
  options.device = FakeDevice::device();
  ASSERT_OK_AND_ASSIGN(const auto group, CreateLocalGroup(1, options));
  const at::Tensor tensor =
      at::ones({2}, at::TensorOptions(at::kFloat).device(options.device));
  ASSERT_OK_AND_ASSIGN(const auto work, group[0]->Broadcast(tensor, 0, "b"));
  {
    const FakeDevice::Stall stall;
    EXPECT_THAT(work->Wait(absl::Now()),
                StatusIs(Code::kDeadlineExceeded,
                         HasSubstr("its stream has not done it")));
  }
  EXPECT_THAT(group[0]->Broadcast(tensor, 0, "b"),
              StatusIs(Code::kAborted, HasSubstr("its stream")));
}

TEST(LocalCommunicatorTest, OnlyOneRankMayHaveADevice) {
  LocalGroupOptions options;
  options.device = c10::Device(c10::kCUDA, 0);
  EXPECT_THAT(CreateLocalGroup(2, options),
              StatusIs(Code::kInvalidArgument, HasSubstr("2 ranks on cuda:0")));
}

using OperationPtr = std::shared_ptr<Rendezvous::Operation>;

Call Sum(std::string label = "a", int64_t count = 1) {
  return {Collective::kAllReduce, std::move(label), "int", count, "sum"};
}

// Every payload is an int*, and all are set to their sum.
void SumPayloads(absl::Span<const std::any> payloads) {
  int sum = 0;
  for (const std::any& value : payloads) sum += *std::any_cast<int*>(value);
  for (const std::any& value : payloads) *std::any_cast<int*>(value) = sum;
}

absl::StatusOr<OperationPtr> EnterSum(Rendezvous& group, int rank, int* value,
                                      std::string label = "a") {
  return group.Enter(rank, Sum(std::move(label)), value, SumPayloads);
}

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }
absl::Time Past() { return absl::InfinitePast(); }

TEST(RendezvousTest, PayloadsAreDroppedBeforeTheOperationIsDone) {
  Rendezvous group(RankNames{2});
  const auto payload = std::make_shared<int>(1);
  const auto nothing = [](absl::Span<const std::any>) {};
  ASSERT_OK_AND_ASSIGN(OperationPtr first,
                       group.Enter(0, Sum(), payload, nothing));
  EXPECT_EQ(payload.use_count(), 2);
  ASSERT_OK(group.Enter(1, Sum(), payload, nothing));
  EXPECT_EQ(payload.use_count(), 1);
  ASSERT_OK(group.Enter(0, Sum(), payload, nothing));
  group.Abort(1, absl::CancelledError("enough"));
  EXPECT_EQ(payload.use_count(), 1);
}

TEST(RendezvousTest, MissedDeadlineNamesWhoIsMissingAndEndsTheGroup) {
  Rendezvous group(RankNames{3});
  int values[] = {1, 2, 3};
  for (int rank : {0, 1, 2}) ASSERT_OK(EnterSum(group, rank, &values[rank]));
  ASSERT_OK_AND_ASSIGN(OperationPtr operation,
                       EnterSum(group, 0, &values[0], "b"));
  ASSERT_OK(EnterSum(group, 2, &values[2], "b"));
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_THAT(
        group.Wait(0, operation, Past()),
        StatusIs(Code::kDeadlineExceeded,
                 AllOf(HasSubstr("all-reduce #1 of b on rank 0 of 3"),
                       HasSubstr("rank 1 (last seen in all-reduce #0 of a)"),
                       ::testing::Not(HasSubstr("rank 2")))));
  }
  EXPECT_THAT(group.Wait(2, operation, Past()),
              StatusIs(Code::kAborted, HasSubstr("rank 0 gave up")));
  EXPECT_THAT(EnterSum(group, 1, &values[1], "b"),
              StatusIs(Code::kAborted, HasSubstr("rank 0 gave up")));
}

TEST(RendezvousTest, DifferentCallsFailOnAllRanks) {
  Rendezvous group(RankNames{3});
  int values[] = {1, 2, 3};
  ASSERT_OK_AND_ASSIGN(OperationPtr operation, EnterSum(group, 0, &values[0]));
  const auto differ =
      StatusIs(Code::kInvalidArgument,
               AllOf(HasSubstr("rank 0 called all-reduce of a (int x 1, sum)"),
                     HasSubstr("rank 1 called all-reduce of a (int x 2, sum)"),
                     HasSubstr("rank 2 called nothing yet")));
  EXPECT_THAT(group.Enter(1, Sum("a", 2), &values[1], SumPayloads), differ);
  EXPECT_THAT(group.Wait(0, operation, Soon()), differ);
  EXPECT_THAT(EnterSum(group, 2, &values[2]), differ);
}

TEST(RendezvousTest, WhatALeavingRankEnteredStaysValid) {
  Rendezvous group(RankNames{2});
  int values[] = {1, 2};
  ASSERT_OK(EnterSum(group, 0, &values[0]));
  group.Leave(0);
  ASSERT_OK_AND_ASSIGN(OperationPtr operation, EnterSum(group, 1, &values[1]));
  EXPECT_OK(group.Wait(1, operation, Soon()));
  EXPECT_EQ(values[1], 3);
  EXPECT_THAT(
      EnterSum(group, 1, &values[1], "b"),
      StatusIs(Code::kUnavailable,
               HasSubstr("rank 0 (last seen in all-reduce #0 of a) has left")));
}

// Many operations from many threads; worth most under ThreadSanitizer.
TEST(RendezvousTest, ConcurrentRanksAgree) {
  constexpr int kRanks = 5;
  constexpr int kOperations = 300;
  Rendezvous group(RankNames{kRanks});
  std::vector<std::string> errors(kRanks);
  std::vector<std::thread> threads;
  threads.reserve(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < kOperations; ++i) {
        int value = rank + i;
        auto operation = EnterSum(group, rank, &value);
        absl::Status status = operation.status();
        if (status.ok()) status = group.Wait(rank, *operation, Soon());
        if (!status.ok()) errors[rank] = status.ToString();
        if (value != 10 + kRanks * i) errors[rank] = "wrong sum";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(errors, ::testing::Each(""));
}

}  // namespace
}  // namespace fsdp::comm::testing
