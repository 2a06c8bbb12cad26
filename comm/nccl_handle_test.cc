// With an NCCL of our own, which needs no GPU: functions of the program come
// before those of libraries.
#include "comm/nccl_handle.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

constexpr int kPolls = 7;

thread_local int current_device = 0;

// How communicators have ended: "abort on 3".
absl::Mutex ended_mutex;
std::vector<std::string> ended ABSL_GUARDED_BY(ended_mutex);
// What a communicator's end waits for; null: nothing.
absl::Notification* hold = nullptr;

}  // namespace

struct ncclComm {
  explicit ncclComm(int polls) : busy_polls(polls) {}

  ncclResult_t Begin() {
    if (busy_polls > 0) return ncclInvalidArgument;
    busy_polls = kPolls;
    return ncclSuccess;
  }
  void Finish() {
    busy_polls = 0;
    if (part != nullptr) *std::exchange(part, nullptr) = new ncclComm(0);
  }
  ncclResult_t End(const char* how) {
    if (hold != nullptr) hold->WaitForNotification();
    Finish();
    {
      absl::MutexLock lock(&ended_mutex);
      ended.push_back(absl::StrCat(how, " on ", current_device));
    }
    delete this;
    return ncclSuccess;
  }

  int busy_polls;              // until what is in progress is over
  ncclComm_t* part = nullptr;  // what a split in progress makes
};

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int /*nranks*/,
                                    ncclUniqueId /*id*/, int /*rank*/,
                                    ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidUsage;
  *comm = new ncclComm(kPolls);
  return ncclInProgress;
}

// Says that it is done, as NCCL's does, and has only begun.
ncclResult_t ncclCommSplit(ncclComm_t comm, int /*color*/, int /*key*/,
                           ncclComm_t* part, ncclConfig_t* /*config*/) {
  comm->part = part;
  return comm->Begin();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (comm->busy_polls > 0 && --comm->busy_polls == 0) comm->Finish();
  *error = comm->busy_polls > 0 ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const ncclResult_t begun = comm->Begin();
  return begun == ncclSuccess ? ncclInProgress : begun;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return comm->End("destroy"); }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return comm->End("abort"); }

}  // extern "C"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

std::vector<std::string> Ended() {
  absl::MutexLock lock(&ended_mutex);
  return ended;
}

class NcclHandleTest : public ::testing::Test {
 protected:
  NcclHandleTest() {
    current_device = 0;
    absl::MutexLock lock(&ended_mutex);
    ended.clear();
  }

  static std::unique_ptr<NcclHandle> Connect() {
    absl::StatusOr<std::unique_ptr<NcclHandle>> handle = NcclHandle::Connect(
        ncclUniqueId(), /*rank=*/0, /*world_size=*/2, Soon());
    EXPECT_OK(handle);
    return *std::move(handle);
  }
};

TEST_F(NcclHandleTest, ACallThatHasOnlyBegunIsWaitedFor) {
  const std::unique_ptr<NcclHandle> handle = Connect();
  ncclComm_t seen = nullptr;
  EXPECT_OK(handle->Call("begin", Soon(), [&](ncclComm_t comm) {
    seen = comm;
    return comm->Begin();
  }));
  EXPECT_EQ(seen->busy_polls, 0);
}

TEST_F(NcclHandleTest, ASplitThatHasOnlyBegunIsWaitedFor) {
  const std::unique_ptr<NcclHandle> handle = Connect();
  const auto part = handle->Split(/*color=*/0, /*key=*/0, Soon());
  ASSERT_OK(part);
  EXPECT_OK((*part)->Call("use", Soon(), [](ncclComm_t comm) {
    return comm == nullptr ? ncclInternalError : ncclSuccess;
  }));
}

TEST_F(NcclHandleTest, WhatASplitMakesTooLateIsAborted) {
  std::unique_ptr<NcclHandle> handle = Connect();
  EXPECT_THAT(handle->Split(/*color=*/0, /*key=*/0, absl::Now()),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("split an NCCL group")));
  handle.reset();
  EXPECT_THAT(Ended(), ElementsAre("abort on 0", "abort on 0"));
}

TEST_F(NcclHandleTest, CallsOfSeveralThreadsTakeTurns) {
  const std::unique_ptr<NcclHandle> handle = Connect();
  std::vector<absl::Status> results(3);
  std::vector<std::thread> threads;
  for (absl::Status& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 101; ++i) {
        result.Update(handle->Call(
            "begin", Soon(), [](ncclComm_t comm) { return comm->Begin(); }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) EXPECT_OK(result);
}

TEST_F(NcclHandleTest, EndsOnItsDeviceAndLeavesTheCallersAlone) {
  current_device = 3;
  const std::unique_ptr<NcclHandle> aborted = Connect();
  const std::unique_ptr<NcclHandle> closed = Connect();
  current_device = 1;
  aborted->Abort();
  aborted->Abort();
  closed->Close(Soon());
  EXPECT_EQ(current_device, 1);
  EXPECT_THAT(Ended(), ElementsAre("abort on 3", "destroy on 3"));
  EXPECT_THAT(aborted->Call("call", Soon(),
                            [](ncclComm_t /*comm*/) { return ncclSuccess; }),
              StatusIs(absl::StatusCode::kAborted, HasSubstr("call")));
}

TEST_F(NcclHandleTest, AnEndThatHangsIsLeftBehind) {
  absl::Notification released;
  hold = &released;
  std::unique_ptr<NcclHandle> handle = Connect();
  handle->Close(absl::Now() + absl::Milliseconds(50));
  handle.reset();
  EXPECT_THAT(Ended(), ElementsAre());
  released.Notify();
  const auto has_ended = [] {
    ended_mutex.AssertHeld();
    return !ended.empty();
  };
  absl::MutexLock lock(&ended_mutex);
  EXPECT_TRUE(
      ended_mutex.AwaitWithDeadline(absl::Condition(&has_ended), Soon()));
  hold = nullptr;
}

}  // namespace
}  // namespace fsdp::comm
