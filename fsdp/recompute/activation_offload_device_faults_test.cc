// Offloads a device's tensors with a store that fails or is full, or a device
// that takes too long.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/testing/fake_device.h"
#include "base/testing/status_matchers.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/faulty_store.h"

namespace fsdp {
namespace {

using ::fsdp::offload::ParamStore;
using ::fsdp::offload::testing::Fault;
using ::fsdp::offload::testing::FaultOf;
using ::fsdp::offload::testing::WithFaults;
using ::fsdp::testing::FakeDevice;
using ::fsdp::testing::Make;
using ::fsdp::testing::MoveOne;
using ::fsdp::testing::SmallOptions;
using ::fsdp::testing::StatusIs;
using ::fsdp::testing::StoreComesTo;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Code = absl::StatusCode;
using Regions = std::vector<std::unique_ptr<MovedArguments>>;

constexpr int64_t kElements = 1024;
constexpr int64_t kBytes = kElements * sizeof(float);

at::Tensor OnCpu(int64_t first) {
  return at::arange(first, first + kElements, at::kFloat);
}
at::Tensor Numbers(int64_t first) {
  return OnCpu(first).to(FakeDevice::device());
}

// Returns a store whose memory the device cannot copy, so that all is staged.
std::unique_ptr<ParamStore> Host(int64_t tensors = 8) {
  return offload::HostStore::Make(tensors * kBytes).value();
}

void ExpectMovesIn(MovedArguments& moved, const at::Tensor& expected) {
  const auto tensors = moved.MoveIn();
  ASSERT_OK(tensors.status());
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_TRUE(at::equal(tensors->at(0).cpu(), expected));
  FakeDevice::Reset();
}

class DeviceFaultTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { FakeDevice::Register(); }
  void SetUp() override { FakeDevice::Reset(); }
  void TearDown() override { EXPECT_THAT(FakeDevice::Races(), IsEmpty()); }
};

class FailingStoreTest : public DeviceFaultTest,
                         public ::testing::WithParamInterface<Fault::Effect> {};

TEST_P(FailingStoreTest, WhatCannotBeWrittenStaysInMemoryOfTheHost) {
  const auto offload = Make(
      WithFaults(Host(), {FaultOf(Fault::Operation::kWrite, GetParam(), 1)}));
  const int64_t before = FakeDevice::bytes_in_use();
  Regions regions;
  for (int i = 0; i < 3; ++i) {
    at::Tensor tensor = Numbers(i);
    FakeDevice::Reset();
    regions.push_back(MoveOne(*offload, std::move(tensor)));
    ASSERT_NE(regions.back(), nullptr);
  }
  EXPECT_EQ(offload->stats().failed, 1);
  EXPECT_EQ(offload->stats().tensors_out, 2);
  EXPECT_EQ(offload->stats().stored_bytes, 2 * kBytes);
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 2; i >= 0; --i) ExpectMovesIn(*regions[i], OnCpu(i));
  }
  regions.clear();
  EXPECT_EQ(offload->stats().stored_bytes, 0);
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
}

TEST_P(FailingStoreTest, WhatCannotBeReadIsAnErrorAndCanBeReadAgain) {
  const auto offload = Make(
      WithFaults(Host(), {FaultOf(Fault::Operation::kRead, GetParam(), 0)}));
  const auto moved = MoveOne(*offload, Numbers(1));
  offload->stats();  // finds it written
  EXPECT_THAT(
      moved->MoveIn(),
      StatusIs(Code::kUnavailable,
               AllOf(HasSubstr("Float [1024] on privateuseone:0, back into "
                               "memory: read region"),
                     HasSubstr("injected failure"))));
  FakeDevice::Reset();
  ExpectMovesIn(*moved, OnCpu(1));
}

TEST_P(FailingStoreTest, WhatCannotBeReadAheadIsReadOnceMore) {
  const auto offload = Make(
      WithFaults(Host(), {FaultOf(Fault::Operation::kRead, GetParam(), 1)}));
  const auto first = MoveOne(*offload, Numbers(1));
  const auto second = MoveOne(*offload, Numbers(2));
  offload->stats();
  FakeDevice::Reset();
  ExpectMovesIn(*second, OnCpu(2));
  ExpectMovesIn(*first, OnCpu(1));
}

INSTANTIATE_TEST_SUITE_P(Effects, FailingStoreTest,
                         ::testing::Values(Fault::Effect::kRefuse,
                                           Fault::Effect::kFail,
                                           Fault::Effect::kShorten));

TEST_F(DeviceFaultTest, WhatHasNoRoomInTheStoreStaysOnTheDevice) {
  const auto offload = Make(Host(/*tensors=*/1));
  const auto moved = MoveOne(*offload, Numbers(1));
  at::Tensor tensor = Numbers(2);
  EXPECT_EQ(offload->MoveOut({&tensor}, "a region"), nullptr);
  EXPECT_TRUE(at::equal(tensor.cpu(), OnCpu(2)));
  EXPECT_EQ(offload->stats().full, 1);
  EXPECT_EQ(offload->stats().failed, 0);
}

TEST_F(DeviceFaultTest, ATensorStaysWhereTheDeviceIsTheWindowBehind) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  options.timeout = absl::Milliseconds(1);
  const auto offload = Make(Host(), options);
  const at::Tensor first = Numbers(1);
  std::unique_ptr<MovedArguments> moved;
  {
    const FakeDevice::Stall stall;
    moved = MoveOne(*offload, first);
    for (int i = 1; i <= 3; ++i) {
      at::Tensor tensor = Numbers(2);
      EXPECT_EQ(offload->MoveOut({&tensor}, "a region"), nullptr);
      EXPECT_TRUE(tensor.defined());
      EXPECT_EQ(offload->stats().failed, i);
    }
    const auto found = moved->MoveIn();
    ASSERT_OK(found.status());
    EXPECT_TRUE(found->at(0).is_alias_of(first));
  }
  EXPECT_NE(MoveOne(*offload, Numbers(3)), nullptr);
  EXPECT_EQ(offload->stats().tensors_out, 2);
  EXPECT_EQ(offload->stats().failed, 3);
}

// The host must not overwrite what it has read before the device has copied it.
TEST_F(DeviceFaultTest, AReadWaitsForTheWindowOfCopiesThatAreUnderWay) {
  ActivationOffloadOptions options = SmallOptions();
  options.window_bytes = kBytes;
  options.regions_ahead = 0;
  options.timeout = absl::Milliseconds(1);
  const auto offload = Make(Host(), options);
  const auto first = MoveOne(*offload, Numbers(1));
  offload->stats();
  const auto second = MoveOne(*offload, Numbers(2));
  offload->stats();
  EXPECT_EQ(offload->stats().tensors_out, 2);
  {
    const FakeDevice::Stall stall;
    ASSERT_OK(second->MoveIn().status());
    EXPECT_THAT(first->MoveIn(),
                StatusIs(Code::kDeadlineExceeded,
                         AllOf(HasSubstr("read region 'activation 0 of"),
                               HasSubstr("privateuseone:0 has not come to the "
                                         "end of a copy in time"))));
  }
  FakeDevice::Reset();
  ExpectMovesIn(*first, OnCpu(1));
}

TEST_F(DeviceFaultTest, WhatIsAbandonedWhileTheStoreWritesIsErasedAfterwards) {
  Fault slow = FaultOf(Fault::Operation::kWrite, Fault::Effect::kDelay, 0);
  slow.delay = absl::Milliseconds(20);
  const auto offload = Make(WithFaults(Host(), {slow}));
  auto moved = MoveOne(*offload, Numbers(1));
  EXPECT_EQ(offload->stats().stored_bytes, kBytes);
  FakeDevice::Reset();
  // The tensor may be on the device again while the store still writes.
  ExpectMovesIn(*moved, OnCpu(1));
  moved.reset();
  EXPECT_TRUE(StoreComesTo(*offload, 0));
  EXPECT_EQ(offload->stats().failed, 0);
}

}  // namespace
}  // namespace fsdp
