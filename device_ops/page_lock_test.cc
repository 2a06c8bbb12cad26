#include "device_ops/page_lock.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/testing/fake_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

using ::fsdp::testing::FakeDevice;

TEST(PageLockTest, LocksNothingForTheCpu) {
  alignas(4096) char memory[4096];
  EXPECT_FALSE(LockPages(memory, sizeof(memory), c10::Device(c10::kCPU)));
  UnlockPages(memory, sizeof(memory), c10::Device(c10::kCPU));
}

TEST(PageLockTest, CopiesBesideTheHostWhileLocked) {
  FakeDevice::Register();
  const c10::Device device = FakeDevice::device();
  alignas(4096) static char memory[4096];
  const at::Tensor on_device =
      at::empty({4096}, at::TensorOptions(at::kByte).device(device)).zero_();
  const at::Tensor on_host =
      at::from_blob(memory, {4096}, at::TensorOptions(at::kByte));

  FakeDevice::Reset();
  ASSERT_TRUE(LockPages(memory, sizeof(memory), device));
  on_host.copy_(on_device, /*non_blocking=*/true);
  EXPECT_THAT(FakeDevice::HostWaits(), ::testing::IsEmpty());

  UnlockPages(memory, sizeof(memory), device);
  on_host.copy_(on_device, /*non_blocking=*/true);
  EXPECT_THAT(FakeDevice::HostWaits(),
              ::testing::ElementsAre(::testing::HasSubstr("copy to the host")));
}

std::string Text(int64_t bytes) {
  std::string text;
  for (int64_t i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(1 + (i * 7 + i / 251) % 255));
  }
  return text;
}

// Copies from everywhere in a line to everywhere in a line.
TEST(StreamingCopyTest, WritesTheseBytesAndNoOthers) {
  for (const int64_t bytes : {0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129,
                              191, 257, 1021, 4096}) {
    for (int64_t to = 0; to < 64; to += 5) {
      for (int64_t from = 0; from < 64; from += 7) {
        const std::string source = Text(from + bytes + 3);
        std::string target(to + bytes + 70, '\0');
        StreamingCopy(&target[to], &source[from], bytes);
        std::string expected(to + bytes + 70, '\0');
        expected.replace(to, bytes, source, from, bytes);
        ASSERT_EQ(target, expected)
            << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

TEST(StreamingCopyTest, WhoIsToldAfterwardsSeesAll) {
  constexpr int64_t kBytes = 1 << 20;
  constexpr int kRounds = 50;
  std::vector<char> shared(kBytes);
  std::atomic<int> written = 0;
  std::atomic<int> read = 0;
  std::thread reader([&] {
    for (int round = 1; round <= kRounds; ++round) {
      while (written.load(std::memory_order_acquire) < round) {
        std::this_thread::yield();
      }
      const std::vector<char> expected(kBytes, static_cast<char>(round));
      EXPECT_EQ(shared, expected);
      read.store(round, std::memory_order_release);
    }
  });
  for (int round = 1; round <= kRounds; ++round) {
    const std::vector<char> source(kBytes, static_cast<char>(round));
    StreamingCopy(shared.data(), source.data(), kBytes);
    written.store(round, std::memory_order_release);
    while (read.load(std::memory_order_acquire) < round) {
      std::this_thread::yield();
    }
  }
  reader.join();
}

}  // namespace
}  // namespace fsdp::device_ops
