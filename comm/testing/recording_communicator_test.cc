#include "comm/testing/recording_communicator.h"

#include <ATen/ops/zeros.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "base/testing/status_matchers.h"
#include "comm/local/local_communicator.h"
#include "comm/testing/communicator_contract.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::comm::testing {
namespace {

using ::testing::ElementsAre;

// Returns a log that discards what it is given, and outlives every group.
CollectiveLog* Unread() {
  static CollectiveLog* const log = new CollectiveLog(/*max_trace=*/0);
  return log;
}

INSTANTIATE_TEST_SUITE_P(
    Recording, CommunicatorContract,
    ::testing::Values(ContractBackend{
        "recording",
        [](int world_size, absl::Duration timeout) -> absl::StatusOr<Group> {
          FSDP_ASSIGN_OR_RETURN(Group group,
                                CreateLocalGroup(world_size, {timeout}));
          for (auto& comm : group) comm = Record(std::move(comm), Unread());
          return group;
        }}),
    BackendName);

class RecordingCommunicatorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(Group group, CreateLocalGroup(1));
    comm_ = Record(std::move(group[0]), &log_);
  }

  std::vector<std::string> Trace() {
    std::vector<std::string> lines;
    for (const CollectiveRecord& record : log_.Trace()) {
      lines.push_back(ToString(record));
    }
    return lines;
  }

  CollectiveLog log_{/*max_trace=*/5};
  std::unique_ptr<Communicator> comm_;
  const at::Tensor tensor_ = at::zeros({6});
};

TEST_F(RecordingCommunicatorTest, TracesWholeTensorsInOrder) {
  EXPECT_OK(comm_->AllGather(tensor_, tensor_, "a"));
  EXPECT_OK(comm_->ReduceScatter(tensor_, tensor_, ReduceOp::kSum, "b"));
  EXPECT_OK(comm_->AllReduce(tensor_.narrow(0, 0, 1), ReduceOp::kMax, "c"));
  EXPECT_OK(comm_->AllToAll(at::zeros({6}), tensor_, "c"));
  EXPECT_OK(comm_->Broadcast(tensor_, 0, "a"));
  EXPECT_THAT(
      Trace(),
      ElementsAre("all-gather of a, 24 bytes", "reduce-scatter of b, 24 bytes",
                  "all-reduce of c, 4 bytes", "all-to-all of c, 24 bytes",
                  "broadcast of a, 24 bytes"));
  log_.Clear();
  EXPECT_THAT(Trace(), ElementsAre());
}

TEST_F(RecordingCommunicatorTest, CountsByCollectiveAndLabelPastTheTrace) {
  for (int i = 0; i < 10; ++i) {
    EXPECT_OK(comm_->AllGather(tensor_, tensor_, i < 3 ? "a" : "b"));
  }
  EXPECT_EQ(log_.TotalsOf(Collective::kAllGather).count, 10);
  EXPECT_EQ(log_.TotalsOf(Collective::kAllGather).bytes, 240);
  EXPECT_EQ(log_.TotalsOf(Collective::kAllGather, "a").count, 3);
  EXPECT_EQ(log_.TotalsOf(Collective::kAllReduce).count, 0);
  EXPECT_EQ(log_.Trace().size(), 5u);
}

TEST_F(RecordingCommunicatorTest, WhatIsRefusedIsNotCounted) {
  EXPECT_FALSE(comm_->Broadcast(tensor_, 1, "a").ok());
  comm_->Abort(absl::InternalError("over"));
  EXPECT_FALSE(comm_->Broadcast(tensor_, 0, "a").ok());
  EXPECT_EQ(log_.TotalsOf(Collective::kBroadcast).count, 0);
}

TEST_F(RecordingCommunicatorTest, SubGroupsRecordIntoTheSameLog) {
  ASSERT_OK_AND_ASSIGN(auto part, comm_->Split(0, 0));
  EXPECT_OK(part->Broadcast(tensor_, 0, "part"));
  EXPECT_EQ(log_.TotalsOf(Collective::kBroadcast, "part").count, 1);
}

}  // namespace
}  // namespace fsdp::comm::testing
