#include "third_party/cuda/smoke.h"

#include <vector>

#include "gtest/gtest.h"

namespace {

TEST(CudaTest, AKernelRuns) {
  for (int64_t n : {0, 1, 257, 10'007}) {
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, (n + 1) * sizeof(int64_t)), cudaSuccess);
    auto* device = static_cast<int64_t*>(memory);
    ASSERT_EQ(cudaMemset(device, 0, (n + 1) * sizeof(int64_t)), cudaSuccess);
    ASSERT_EQ(CountUp(device, n, nullptr), cudaSuccess);
    std::vector<int64_t> host(n + 1, -1);
    ASSERT_EQ(cudaMemcpy(host.data(), device, (n + 1) * sizeof(int64_t),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(host[i], i);
    EXPECT_EQ(host[n], 0) << "written past the end";
    EXPECT_EQ(cudaFree(device), cudaSuccess);
  }
}

}  // namespace
