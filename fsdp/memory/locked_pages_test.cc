#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "fsdp/memory/device_copies.h"
#include "offload/page_memory.h"
#include "offload/param_store.h"

namespace fsdp {
namespace {

using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 3 * offload::kPageBytes;

// Returns the host's waits while it copies the last page to the device.
std::vector<std::string> WaitsForCopyFrom(char* memory) {
  const at::Tensor on_host =
      at::from_blob(memory + kBytes - offload::kPageBytes,
                    {offload::kPageBytes}, at::TensorOptions(at::kByte));
  const at::Tensor on_device = at::empty_like(on_host, FakeDevice::device());
  FakeDevice::Reset();
  on_device.copy_(on_host, /*non_blocking=*/true);
  std::vector<std::string> waits = FakeDevice::HostWaits();
  FakeDevice::Reset();
  return waits;
}

TEST(LockedPagesTest, AreLockedUntilTheyAreFreed) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  ASSERT_OK_AND_ASSIGN(char* const memory, pages.Allocate(kBytes));
  EXPECT_TRUE(pages.locked());
  EXPECT_THAT(WaitsForCopyFrom(memory), ::testing::IsEmpty());
  pages.Free(memory, kBytes);
}

TEST(LockedPagesTest, AreNotLockedForOtherMemoryThatIsThereLater) {
  FakeDevice::Register();
  LockedPages pages(FakeDevice::device());
  ASSERT_OK_AND_ASSIGN(char* const memory, pages.Allocate(kBytes));
  pages.Free(memory, kBytes);
  // The system may give the same addresses again, or others.
  const auto again =
      offload::PageMemory::Allocate(offload::PageAllocator::System(), kBytes);
  ASSERT_OK(again.status());
  EXPECT_THAT(WaitsForCopyFrom(again->data()), ::testing::SizeIs(1));
}

TEST(LockedPagesTest, AreOrdinaryWhereNothingCanLockThem) {
  LockedPages pages{c10::Device(c10::kCPU)};
  ASSERT_OK_AND_ASSIGN(char* const memory, pages.Allocate(kBytes));
  EXPECT_FALSE(pages.locked());
  memory[0] = 'x';
  pages.Free(memory, kBytes);
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
