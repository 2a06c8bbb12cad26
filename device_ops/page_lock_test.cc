#include "device_ops/page_lock.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "base/testing/fake_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::device_ops {
namespace {

using ::fsdp::testing::FakeDevice;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());

  UnlockPages(memory, sizeof(memory), device);
  on_host.copy_(on_device, /*non_blocking=*/true);
  EXPECT_THAT(FakeDevice::HostWaits(),
              ElementsAre(HasSubstr("copy to the host")));
}

}  // namespace
}  // namespace fsdp::device_ops
