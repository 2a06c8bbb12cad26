// The operators on a GPU.
#include <ATen/ops/full.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>

#include "device_ops/pack.h"
#include "device_ops/testing/operator_cases.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::cuda {
namespace {

using ::fsdp::device_ops::testing::Difference;
using ::fsdp::device_ops::testing::OperatorsTest;
using ::fsdp::device_ops::testing::RandomNumbers;
using ::fsdp::device_ops::testing::TestedDevice;

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

INSTANTIATE_TEST_SUITE_P(Cuda, OperatorsTest,
                         ::testing::Values(TestedDevice{
                             "cuda", c10::Device(c10::kCUDA, 0), [] {}, kAny,
                             kAny}));

TEST(CudaPackTest, RunsOnTheCurrentStream) {
  const at::Tensor source = RandomNumbers(at::kFloat, 1'000'003, 1);
  const at::Tensor moved = source.to(at::kCUDA);
  const at::Tensor out = at::full({1'000'003}, 77, moved.options());
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStream before = c10::cuda::getCurrentCUDAStream();
  c10::cuda::setCurrentCUDAStream(stream);
  CopyScaled(out, moved, 1);
  Packing packing;
  packing.AddPiece(0, 0, 0, source.numel());
  Pack(out, {moved}, packing, 1, /*accumulate=*/true);
  c10::cuda::setCurrentCUDAStream(before);
  stream.synchronize();
  EXPECT_EQ(Difference(out.cpu(), source.add(source)), "");
}

}  // namespace
}  // namespace fsdp::device_ops::cuda
