#include "fsdp/locked_pages.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "absl/status/status.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 3 * offload::kPageBytes;

bool IsPinned(char* memory) {
  return at::from_blob(memory, {kBytes}, at::TensorOptions(at::kByte))
      .is_pinned();
}

TEST(LockedPagesTest, AreLockedUntilTheyAreFreed) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  const absl::StatusOr<char*> memory = pages.Allocate(kBytes);
  ASSERT_OK(memory);
  EXPECT_TRUE(pages.locked());
  EXPECT_TRUE(IsPinned(*memory));
  EXPECT_TRUE(IsPinned(*memory + kBytes - 1));
  (*memory)[kBytes - 1] = 'x';
  pages.Free(*memory, kBytes);
  EXPECT_FALSE(IsPinned(*memory));
}

TEST(LockedPagesTest, AreOrdinaryWhereNothingCanLockThem) {
  LockedPages pages{c10::Device(c10::kCPU)};
  const absl::StatusOr<char*> memory = pages.Allocate(kBytes);
  ASSERT_OK(memory);
  EXPECT_FALSE(pages.locked());
  (*memory)[0] = 'x';
  pages.Free(*memory, kBytes);
}

TEST(LockedPagesTest, SayWhatCannotBeHad) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  EXPECT_THAT(pages.Allocate(int64_t{1} << 60).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("allocate 1152921504606846976 bytes")));
  EXPECT_TRUE(pages.locked());
}

}  // namespace
}  // namespace fsdp
