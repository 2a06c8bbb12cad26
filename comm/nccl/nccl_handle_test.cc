// Uses an NCCL of our own, which needs no GPU: functions of the program come
// before those of libraries.
#include "comm/nccl/nccl_handle.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/testing/status_matchers.h"

namespace {

thread_local int current_device = 0;

// Lists how communicators have ended: "abort on 3".
absl::Mutex ended_mutex;
std::vector<std::string> ended ABSL_GUARDED_BY(ended_mutex);
// The end of a communicator waits for this, unless it is null.
absl::Notification* hold = nullptr;
// Calls that need peers wait until they are aborted.
std::atomic<bool> peers_are_missing{false};

// State of this thread, whose aborts end communicators when it closes the
// group.
thread_local int group_depth = 0;
thread_local std::vector<ncclComm_t> aborted_in_group;

}  // namespace

struct ncclComm {
  // Waits as NCCL's calls that connect; an abort is an error.
  ncclResult_t MeetPeers() {
    ++num_calls;
    if (peers_are_missing) is_aborted.WaitForNotification();
    --num_calls;
    return peers_are_missing ? ncclInternalError : ncclSuccess;
  }
  ncclResult_t End(const std::string& how) {
    if (hold != nullptr) hold->WaitForNotification();
    {
      absl::MutexLock lock(&ended_mutex);
      ended.push_back(absl::StrCat(how, num_calls > 0 ? " under a call" : "",
                                   " on ", current_device));
    }
    delete this;
    return ncclSuccess;
  }

  absl::Notification is_aborted;
  std::atomic<int> num_calls{0};
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
  if (config->blocking != 1) return ncclInvalidUsage;
  *comm = new ncclComm;
  return (*comm)->MeetPeers();
}

// An abort of `comm` ends this call, too.
ncclResult_t ncclCommSplit(ncclComm_t comm, int /*color*/, int /*key*/,
                           ncclComm_t* part, ncclConfig_t* /*config*/) {
  ncclResult_t result = comm->MeetPeers();
  *part = new ncclComm;
  return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t /*comm*/, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t /*comm*/) { return ncclSuccess; }

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return comm->End("destroy"); }

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0) return ncclSuccess;
  for (ncclComm_t comm : aborted_in_group) comm->End("abort");
  aborted_in_group.clear();
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->is_aborted.Notify();
  if (group_depth == 0) return comm->End("abort");
  aborted_in_group.push_back(comm);
  return ncclSuccess;
}

}  // extern "C"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

absl::Time AtOnce() { return absl::Now() + absl::Milliseconds(20); }

ncclResult_t Succeed(ncclComm_t /*comm*/) { return ncclSuccess; }

std::vector<std::string> Ended() {
  absl::MutexLock lock(&ended_mutex);
  return ended;
}

class NcclHandleTest : public ::testing::Test {
 protected:
  NcclHandleTest() {
    current_device = 0;
    peers_are_missing = false;
    absl::MutexLock lock(&ended_mutex);
    ended.clear();
  }

  static absl::StatusOr<std::unique_ptr<NcclHandle>> Connect(
      absl::Time deadline = Soon()) {
    return NcclHandle::Connect(ncclUniqueId(), /*rank=*/0, /*world_size=*/2,
                               deadline);
  }
};

TEST_F(NcclHandleTest, AnOperationIsEnqueuedByThisThreadAndACallByAnother) {
  current_device = 2;
  ASSERT_OK_AND_ASSIGN(const auto handle, Connect());
  const std::thread::id here = std::this_thread::get_id();
  EXPECT_OK(handle->Enqueue("sum", [&](ncclComm_t comm) {
    const bool fits = comm != nullptr && std::this_thread::get_id() == here;
    return fits ? ncclSuccess : ncclInternalError;
  }));
  EXPECT_OK(handle->Call("register", Soon(), [here](ncclComm_t comm) {
    const bool fits = comm != nullptr && current_device == 2 &&
                      std::this_thread::get_id() != here;
    return fits ? ncclSuccess : ncclInternalError;
  }));
}

TEST_F(NcclHandleTest, WhatIsRefusedDoesNoHarm) {
  ASSERT_OK_AND_ASSIGN(const auto handle, Connect());
  const auto refuse = [](ncclComm_t /*comm*/) {
    return ncclUnhandledCudaError;
  };
  EXPECT_THAT(
      handle->Call("register", Soon(), refuse),
      StatusIs(Code::kInternal, HasSubstr("register: NCCL says unhandled")));
  EXPECT_THAT(handle->Enqueue("sum", refuse),
              StatusIs(Code::kInternal, HasSubstr("sum: NCCL says unhandled")));
  EXPECT_OK(handle->Enqueue("sum", Succeed));
  EXPECT_OK(handle->Call("register", Soon(), Succeed));
  EXPECT_THAT(Ended(), ElementsAre());
}

TEST_F(NcclHandleTest, SplitsInTime) {
  ASSERT_OK_AND_ASSIGN(auto handle, Connect());
  ASSERT_OK_AND_ASSIGN(auto part,
                       handle->Split(/*color=*/0, /*key=*/0, Soon()));
  EXPECT_OK(part->Enqueue("sum", Succeed));
  EXPECT_OK(handle->Enqueue("sum", Succeed));
  part->Close(Soon());
  handle.reset();
  EXPECT_THAT(Ended(), ElementsAre("destroy on 0", "abort on 0"));
}

TEST_F(NcclHandleTest, AConnectionThatDoesNotComeIsAborted) {
  peers_are_missing = true;
  EXPECT_THAT(Connect(AtOnce()),
              StatusIs(Code::kDeadlineExceeded,
                       HasSubstr("join an NCCL group as rank 0 of 2")));
  EXPECT_THAT(Ended(), ElementsAre("abort on 0"));
}

TEST_F(NcclHandleTest, ASplitThatDoesNotComeIsAbortedWithThePart) {
  ASSERT_OK_AND_ASSIGN(const auto handle, Connect());
  peers_are_missing = true;
  EXPECT_THAT(
      handle->Split(/*color=*/0, /*key=*/0, AtOnce()),
      StatusIs(Code::kDeadlineExceeded, HasSubstr("split an NCCL group")));
  EXPECT_THAT(Ended(), ElementsAre("abort on 0", "abort on 0"));
  EXPECT_THAT(handle->Enqueue("sum", Succeed),
              StatusIs(Code::kAborted, HasSubstr("sum")));
}

TEST_F(NcclHandleTest, AnAbortReleasesAnOperationBeforeItFrees) {
  ASSERT_OK_AND_ASSIGN(const auto handle, Connect());
  peers_are_missing = true;
  absl::Notification is_inside;
  absl::Status status;
  std::thread caller([&] {
    status = handle->Enqueue("first sum", [&](ncclComm_t comm) {
      is_inside.Notify();
      return comm->MeetPeers();
    });
  });
  is_inside.WaitForNotification();
  EXPECT_OK(handle->Health());
  handle->Abort();
  EXPECT_THAT(Ended(), ElementsAre("abort on 0"));
  caller.join();
  EXPECT_THAT(status, StatusIs(Code::kAborted, HasSubstr("first sum")));
}

TEST_F(NcclHandleTest, CallsOfSeveralThreadsTakeTurns) {
  ASSERT_OK_AND_ASSIGN(const auto handle, Connect());
  std::atomic<int> num_inside{0};
  const auto alone = [&](ncclComm_t /*comm*/) {
    const bool is_alone = ++num_inside == 1;
    std::this_thread::yield();
    --num_inside;
    return is_alone ? ncclSuccess : ncclInvalidUsage;
  };
  std::vector<absl::Status> results(3);
  std::vector<std::thread> threads;
  threads.reserve(results.size());
  for (absl::Status& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 101; ++i) {
        result.Update(handle->Enqueue("sum", alone));
        if (i % 10 == 0) result.Update(handle->Call("call", Soon(), alone));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& result : results) EXPECT_OK(result);
}

TEST_F(NcclHandleTest, EndsOnItsDeviceAndLeavesTheCallersAlone) {
  current_device = 3;
  ASSERT_OK_AND_ASSIGN(const auto aborted, Connect());
  ASSERT_OK_AND_ASSIGN(const auto closed, Connect());
  current_device = 1;
  aborted->Abort();
  aborted->Abort();
  closed->Close(Soon());
  EXPECT_EQ(current_device, 1);
  EXPECT_THAT(Ended(), ElementsAre("abort on 3", "destroy on 3"));
  EXPECT_THAT(aborted->Call("call", Soon(), Succeed),
              StatusIs(Code::kAborted, HasSubstr("call")));
  EXPECT_OK(aborted->Health());
}

TEST_F(NcclHandleTest, AnEndThatHangsIsLeftBehind) {
  absl::Notification released;
  hold = &released;
  ASSERT_OK_AND_ASSIGN(auto handle, Connect());
  handle->Close(AtOnce());
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
