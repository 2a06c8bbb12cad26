// Uses an NCCL and a CUDA of our own, which need no GPU.
#include "comm/nccl/nccl_group.h"

#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"
#include "comm/testing/fake_cuda.h"

struct ncclComm {
  absl::Notification is_aborted;
};

namespace {

thread_local std::vector<ncclComm_t> aborted_in_group;

}  // namespace

extern "C" {

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int /*nranks*/,
                                    ncclUniqueId /*id*/, int /*rank*/,
                                    ncclConfig_t* /*config*/) {
  *comm = new ncclComm;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t /*comm*/, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t /*comm*/) { return ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() { return ncclSuccess; }

ncclResult_t ncclGroupEnd() {
  for (ncclComm_t comm : aborted_in_group) delete comm;
  aborted_in_group.clear();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->is_aborted.Notify();
  aborted_in_group.push_back(comm);
  return ncclSuccess;
}

}  // extern "C"

namespace fsdp::comm {
namespace {

using ::fsdp::comm::testing::FakeCuda;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Pair;

using Started = absl::StatusOr<std::shared_ptr<NcclGroup::Operation>>;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

ncclResult_t Succeed(ncclComm_t /*comm*/, cudaStream_t /*stream*/) {
  return ncclSuccess;
}

class NcclGroupTest : public ::testing::Test {
 protected:
  NcclGroupTest() { FakeCuda::Reset(); }
  ~NcclGroupTest() override {
    group_.reset();
    EXPECT_THAT(FakeCuda::Faults(), ::testing::IsEmpty());
  }

  absl::Status Create(absl::Duration timeout = absl::Seconds(30)) {
    FSDP_ASSIGN_OR_RETURN(auto handle,
                          NcclHandle::Connect(ncclUniqueId(), /*rank=*/0,
                                              /*world_size=*/1, Soon()));
    WatchedGroup::Options options;
    options.timeout = timeout;
    options.diagnosis_timeout = absl::Milliseconds(20);
    FSDP_ASSIGN_OR_RETURN(
        group_,
        NcclGroup::Create(std::move(handle), c10::Device(c10::kCUDA, 0),
                          c10::make_intrusive<c10d::HashStore>(), options));
    return absl::OkStatus();
  }

  Started Launch(NcclGroup::Enqueue enqueue = Succeed) {
    Call call;
    call.label = "blocks.2";
    return group_->Launch(call, /*bytes=*/8, enqueue, [] {});
  }

  // Launches an operation that the current stream waits for.
  absl::Status Pass() {
    FSDP_ASSIGN_OR_RETURN(const auto operation, Launch());
    return group_->BlockCurrentStream(*operation);
  }

  // Waits for a further operation, so that the others are done, too.
  absl::Status Settle() {
    FSDP_ASSIGN_OR_RETURN(const auto operation, Launch());
    return group_->Wait(*operation, Soon());
  }

  std::shared_ptr<NcclGroup> group_;
};

TEST_F(NcclGroupTest, AnOperationCostsFiveCallsOfCudaAndNoThread) {
  constexpr int kOperations = 10;
  ASSERT_OK(Create());
  ASSERT_OK(Pass());
  ASSERT_OK(Settle());
  FakeCuda::TakeCalls();
  const int threads = FakeCuda::num_threads();
  for (int i = 0; i < kOperations; ++i) {
    ASSERT_OK(Pass());
    // The watchdog would do so some time later.
    ASSERT_OK(Settle());
  }
  std::map<std::string, int> calls = FakeCuda::TakeCalls();
  calls.erase("cudaEventQuery");  // by the watchdog and by Settle()
  EXPECT_THAT(calls, ::testing::UnorderedElementsAre(
                         Pair("cudaStreamIsCapturing", 2 * kOperations),
                         Pair("cudaEventRecord", 4 * kOperations),
                         Pair("cudaStreamWaitEvent", 3 * kOperations)));
  EXPECT_EQ(FakeCuda::num_threads(), threads);
}

TEST_F(NcclGroupTest, EventsAreAsManyAsOperationsInFlight) {
  constexpr int kOperations = 7;
  ASSERT_OK(Create());
  for (int round = 0; round < 3; ++round) {
    FakeCuda::TakeCalls();
    std::vector<std::shared_ptr<NcclGroup::Operation>> in_flight;
    for (int i = 0; i < kOperations; ++i) {
      ASSERT_OK_AND_ASSIGN(auto operation, Launch());
      in_flight.push_back(std::move(operation));
    }
    ASSERT_OK(group_->Wait(*in_flight.back(), Soon()));
    const std::map<std::string, int> calls = FakeCuda::TakeCalls();
    EXPECT_EQ(calls.count("cudaEventCreateWithFlags"), round == 0 ? 1u : 0u);
    EXPECT_EQ(calls.count("cudaEventDestroy"), 0u);
  }
}

TEST_F(NcclGroupTest, NobodyAsksForWhatIsCaptured) {
  ASSERT_OK(Create());
  ASSERT_OK_AND_ASSIGN(const auto before, Launch());
  ASSERT_OK_AND_ASSIGN(const bool outside, group_->IsBeingCaptured());
  EXPECT_FALSE(outside);
  FakeCuda::BeginCapture();
  ASSERT_OK_AND_ASSIGN(const bool inside, group_->IsBeingCaptured());
  EXPECT_TRUE(inside);
  ASSERT_OK(Pass());
  ASSERT_OK_AND_ASSIGN(const auto captured, Launch());
  ASSERT_OK(group_->BlockCurrentStream(*captured));
  EXPECT_THAT(
      group_->Wait(*captured, Soon()),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               ::testing::AllOf(
                   HasSubstr("all-gather #2 of blocks.2 on rank 0 of 1"),
                   HasSubstr("part of a CUDA graph"))));
  // The watchdog goes on beside the capture.
  EXPECT_OK(group_->Wait(*before, Soon()));
  FakeCuda::EndCapture();
  ASSERT_OK(Pass());
  EXPECT_OK(Settle());
  EXPECT_FALSE(group_->failed());
}

TEST_F(NcclGroupTest, AGroupLeavesInPeaceAfterACapture) {
  ASSERT_OK(Create());
  FakeCuda::BeginCapture();
  ASSERT_OK(Pass());
  FakeCuda::EndCapture();
  group_->Leave();
  EXPECT_FALSE(group_->failed());
}

TEST_F(NcclGroupTest, AnOperationThatCannotBeEnqueuedIsEndedAtItsDeadline) {
  ASSERT_OK(Create(absl::Milliseconds(20)));
  const auto never = [](ncclComm_t comm, cudaStream_t /*stream*/) {
    comm->is_aborted.WaitForNotification();
    return ncclInternalError;
  };
  EXPECT_THAT(Launch(never),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("all-gather #0 of blocks.2 on rank 0 of 1")));
  EXPECT_TRUE(group_->failed());
  EXPECT_FALSE(Launch().ok());
}

TEST_F(NcclGroupTest, WhatNcclRefusesFailsTheGroup) {
  ASSERT_OK(Create());
  EXPECT_THAT(Launch([](ncclComm_t /*comm*/, cudaStream_t /*stream*/) {
                return ncclInvalidArgument;
              }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("all-gather #0 of blocks.2")));
  EXPECT_TRUE(group_->failed());
}

}  // namespace
}  // namespace fsdp::comm
