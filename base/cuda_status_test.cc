#include "base/cuda_status.h"

#include "base/testing/status_matchers.h"

namespace fsdp {
namespace {

using ::fsdp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(CudaToStatusTest, SuccessIsOk) {
  EXPECT_OK(CudaToStatus(cudaSuccess, "copy"));
}

TEST(CudaToStatusTest, SaysWhatWasTriedWhyAndWhatToDo) {
  EXPECT_THAT(
      CudaToStatus(cudaErrorMemoryAllocation, "allocate 7 bytes of blocks.2"),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(StartsWith("allocate 7 bytes of blocks.2: out of memory"),
                     HasSubstr("(cudaErrorMemoryAllocation)"),
                     HasSubstr("smaller batch"))));
}

TEST(CudaToStatusTest, EveryKindOfErrorHasItsCode) {
  const struct {
    cudaError_t error;
    absl::StatusCode code;
  } cases[] = {
      {cudaErrorNoDevice, absl::StatusCode::kFailedPrecondition},
      {cudaErrorInsufficientDriver, absl::StatusCode::kFailedPrecondition},
      {cudaErrorNoKernelImageForDevice, absl::StatusCode::kFailedPrecondition},
      {cudaErrorDevicesUnavailable, absl::StatusCode::kUnavailable},
      {cudaErrorECCUncorrectable, absl::StatusCode::kUnavailable},
      {cudaErrorInvalidDevice, absl::StatusCode::kInvalidArgument},
      {cudaErrorNotSupported, absl::StatusCode::kUnimplemented},
      {cudaErrorIllegalAddress, absl::StatusCode::kInternal},
      {cudaErrorLaunchFailure, absl::StatusCode::kInternal},
      {cudaErrorUnknown, absl::StatusCode::kInternal},
  };
  for (const auto& expected : cases) {
    EXPECT_THAT(
        CudaToStatus(expected.error, "step"),
        StatusIs(expected.code, HasSubstr(cudaGetErrorName(expected.error))));
  }
}

}  // namespace
}  // namespace fsdp
