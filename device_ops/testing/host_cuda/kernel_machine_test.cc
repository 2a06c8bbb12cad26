#include "device_ops/testing/host_cuda/kernel_machine.h"

#include <cuda_runtime.h>

#include <numeric>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops::testing {
namespace {

using ::testing::HasSubstr;

constexpr Order kOrders[] = {Order::kForward, Order::kReversed,
                             Order::kShuffled};
constexpr unsigned kAllLanes = 0xffffffff;

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <bool kWaits>
__global__ void MirrorKernel(const int* in, int* out) {
  __shared__ int tile[96];
  for (int round = 0; round < 3; ++round) {
    tile[threadIdx.x] = in[blockIdx.x * 96 + threadIdx.x] + round;
    if constexpr (kWaits) __syncthreads();
    out[blockIdx.x * 96 + threadIdx.x] = tile[95 - threadIdx.x];
    if constexpr (kWaits) __syncthreads();
  }
}

std::vector<int> Mirrored(void (*kernel)(const int*, int*), Order order) {
  KernelMachine::Get().set_order(order);
  std::vector<int> in(size_t{3} * 96);
  std::iota(in.begin(), in.end(), 1000);
  std::vector<int> out(in.size());
  EXPECT_EQ(Launch(kernel, dim3(3), dim3(96), in.data(), out.data()),
            cudaSuccess);
  return out;
}

TEST(KernelMachineTest, BarriersHoldAllThreads) {
  for (Order order : kOrders) {
    const std::vector<int> out = Mirrored(&MirrorKernel<true>, order);
    for (int i = 0; i < 3 * 96; ++i) {
      EXPECT_EQ(out[i], 1000 + i / 96 * 96 + 95 - i % 96 + 2) << i;
    }
  }
}

TEST(KernelMachineTest, AMissingBarrierShows) {
  std::set<std::vector<int>> results;
  for (Order order : kOrders) {
    results.insert(Mirrored(&MirrorKernel<false>, order));
  }
  EXPECT_GT(results.size(), 1u);
}

__global__ void SomeWaitKernel(int first) {
  if (static_cast<int>(threadIdx.x) < first) return;
  __syncthreads();
}

__global__ void TwoPlacesKernel() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void SomeExchangeKernel(unsigned mask, int lanes, int* out) {
  if (static_cast<int>(threadIdx.x) >= lanes) return;
  out[threadIdx.x] = __shfl_xor_sync(mask, 5, 1);
}

TEST(KernelMachineTest, ThreadsThatWaitInVainAreAFailure) {
  for (Order order : kOrders) {
    KernelMachine& machine = KernelMachine::Get();
    machine.set_order(order);
    EXPECT_EQ(Launch(&SomeWaitKernel, dim3(2), dim3(40), 3),
              cudaErrorLaunchFailure);
    EXPECT_THAT(machine.failure(), HasSubstr("lane 0 has ended, lane 3 waits "
                                             "at the barrier of line"));
    EXPECT_EQ(Launch(&TwoPlacesKernel, dim3(1), dim3(32)),
              cudaErrorLaunchFailure);
    EXPECT_THAT(machine.failure(), HasSubstr("lane 1 waits at the barrier"));
    std::vector<int> out(64);
    EXPECT_EQ(Launch(&SomeExchangeKernel, dim3(1), dim3(64), kAllLanes, 63,
                     out.data()),
              cudaErrorLaunchFailure);
    EXPECT_THAT(machine.failure(), HasSubstr("lane 32 exchanges in line"));
    EXPECT_EQ(Launch(&SomeExchangeKernel, dim3(1), dim3(40), kAllLanes, 40,
                     out.data()),
              cudaErrorLaunchFailure);
    // The machine goes on.
    EXPECT_EQ(
        Launch(&SomeExchangeKernel, dim3(1), dim3(40), 0xffu, 8, out.data()),
        cudaSuccess);
    EXPECT_EQ(machine.failure(), "");
    EXPECT_EQ(
        Launch(&SomeExchangeKernel, dim3(1), dim3(32), 0x7fu, 7, out.data()),
        cudaErrorLaunchFailure);
    EXPECT_THAT(machine.failure(),
                HasSubstr("lane 6 exchanges with lane 7 in line"));
  }
}

TEST(KernelMachineTest, RefusesLaunchesThatAGpuRefuses) {
  for (const auto& [blocks, threads] :
       {std::pair<unsigned, unsigned>{0, 32}, {1, 0}, {1, 1025}}) {
    EXPECT_EQ(Launch(&SomeWaitKernel, dim3(blocks), dim3(threads), 0),
              cudaErrorInvalidConfiguration);
  }
  EXPECT_EQ(Launch(&SomeWaitKernel, dim3(1), dim3(1024), 0), cudaSuccess);
}

}  // namespace
}  // namespace fsdp::device_ops::testing
