#include <nccl.h>

#include "base/testing/status_matchers.h"
#include "comm/nccl/nccl_handle.h"

namespace fsdp::comm {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;
using Code = absl::StatusCode;

TEST(NcclToStatusTest, SuccessIsOk) {
  EXPECT_OK(NcclToStatus(ncclSuccess, "all-gather"));
}

TEST(NcclToStatusTest, SaysWhatWasTriedWhyAndWhatToDo) {
  EXPECT_THAT(
      NcclToStatus(ncclInvalidUsage, "join rank 1 of 2", "Duplicate GPU"),
      StatusIs(
          Code::kInvalidArgument,
          ::testing::AllOf(::testing::StartsWith(
                               "join rank 1 of 2: NCCL says invalid usage"),
                           HasSubstr("; Duplicate GPU: "),
                           HasSubstr("each rank needs its own"))));
}

TEST(NcclToStatusTest, EveryResultHasItsCode) {
  const struct {
    ncclResult_t result;
    absl::StatusCode code;
  } cases[] = {
      {ncclUnhandledCudaError, Code::kInternal},
      {ncclSystemError, Code::kUnavailable},
      {ncclInternalError, Code::kInternal},
      {ncclInvalidArgument, Code::kInvalidArgument},
      {ncclInvalidUsage, Code::kInvalidArgument},
      {ncclRemoteError, Code::kUnavailable},
      {ncclInProgress, Code::kDeadlineExceeded},
  };
  for (const auto& expected : cases) {
    EXPECT_THAT(NcclToStatus(expected.result, "w"),
                StatusIs(expected.code,
                         HasSubstr(ncclGetErrorString(expected.result))));
  }
}

}  // namespace
}  // namespace fsdp::comm
