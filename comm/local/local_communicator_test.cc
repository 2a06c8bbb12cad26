#include "comm/local/local_communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/communicator_contract.h"
#include "comm/testing/run_ranks.h"

namespace fsdp::comm::testing {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::EndsWith;
using ::testing::HasSubstr;

using Code = absl::StatusCode;

INSTANTIATE_TEST_SUITE_P(Local, CommunicatorContract,
                         ::testing::Values(ContractBackend{
                             "local",
                             [](int world_size, absl::Duration timeout) {
                               return CreateLocalGroup(world_size, {timeout});
                             }}),
                         BackendName);

TEST(LocalCommunicatorTest, RefusesAGroupOfNobodyAndADeviceOfSeveral) {
  EXPECT_THAT(CreateLocalGroup(0),
              StatusIs(Code::kInvalidArgument, HasSubstr("0 ranks")));
  LocalGroupOptions options;
  options.device = c10::Device(c10::kCUDA, 0);
  EXPECT_THAT(CreateLocalGroup(2, options),
              StatusIs(Code::kInvalidArgument, HasSubstr("2 ranks on cuda:0")));
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
    for (const auto& each : works)
      EXPECT_OK(each->Wait(absl::InfiniteFuture()));
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

// In these tests one thread plays all ranks.
StartedWork Sum(const std::unique_ptr<Communicator>& rank,
                const at::Tensor& tensor, absl::string_view label = "a") {
  return rank->AllReduce(tensor, ReduceOp::kSum, label);
}

TEST(LocalCommunicatorTest, ErrorsSayWhoHasCalledWhat) {
  ASSERT_OK_AND_ASSIGN(const auto late, CreateLocalGroup(3));
  const at::Tensor tensor = at::ones({1});
  for (int rank : {0, 1, 2}) ASSERT_OK(Sum(late[rank], tensor));
  ASSERT_OK_AND_ASSIGN(const auto first, Sum(late[0], tensor, "b"));
  ASSERT_OK(Sum(late[2], tensor, "b"));
  EXPECT_THAT(first->Wait(absl::InfinitePast()),
              StatusIs(Code::kDeadlineExceeded,
                       EndsWith("missing: rank 1 (last seen in all-reduce #0 "
                                "of a)")));
  ASSERT_OK_AND_ASSIGN(const auto differ, CreateLocalGroup(3));
  ASSERT_OK(Sum(differ[0], tensor));
  EXPECT_THAT(
      Sum(differ[1], at::ones({2})),
      StatusIs(Code::kInvalidArgument, HasSubstr("rank 2 called nothing yet")));
}

TEST(LocalCommunicatorTest, TensorsAreDroppedBeforeTheOperationIsDone) {
  ASSERT_OK_AND_ASSIGN(const auto group, CreateLocalGroup(2));
  const at::Tensor tensor = at::ones({1});
  ASSERT_OK_AND_ASSIGN(const auto first, Sum(group[0], tensor));
  EXPECT_EQ(tensor.use_count(), 2u);
  ASSERT_OK_AND_ASSIGN(const auto second, Sum(group[1], tensor));
  EXPECT_EQ(tensor.use_count(), 1u);
  ASSERT_OK_AND_ASSIGN(const auto third, Sum(group[0], tensor));
  group[1]->Abort(absl::CancelledError("enough"));
  EXPECT_EQ(tensor.use_count(), 1u);
}

TEST(LocalCommunicatorTest, WhatALeavingRankEnteredStaysValid) {
  ASSERT_OK_AND_ASSIGN(auto group, CreateLocalGroup(2));
  ASSERT_OK(Sum(group[0], at::ones({1})));
  group[0].reset();
  const at::Tensor tensor = at::ones({1});
  EXPECT_OK(Finish(Sum(group[1], tensor)));
  EXPECT_EQ(tensor.item<float>(), 2);
  EXPECT_THAT(
      Sum(group[1], tensor, "b"),
      StatusIs(Code::kUnavailable,
               HasSubstr("rank 0 (last seen in all-reduce #0 of a) has left")));
}

}  // namespace
}  // namespace fsdp::comm::testing
