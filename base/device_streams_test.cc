#include "base/device_streams.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "absl/time/clock.h"
#include "base/testing/fake_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp {
namespace {

using testing::FakeDevice;
using ::testing::IsEmpty;

const c10::Device kCpu(c10::DeviceType::CPU);

c10::Stream Current() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1)
      .getStream(FakeDevice::device());
}

class DeviceStreams : public ::testing::Test {
 protected:
  DeviceStreams() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }
};

TEST_F(DeviceStreams, AScopeMakesTheStreamCurrent) {
  const c10::Stream main = Current();
  const SideStream one(FakeDevice::device());
  const SideStream high(FakeDevice::device(), SideStream::Priority::kHigh);
  {
    const SideStream::Scope outer(one);
    const c10::Stream in_one = Current();
    EXPECT_NE(in_one, main);
    {
      const SideStream::Scope inner(high);
      EXPECT_NE(Current(), in_one);
      EXPECT_NE(Current(), main);
    }
    EXPECT_EQ(Current(), in_one);
  }
  EXPECT_EQ(Current(), main);
}

TEST_F(DeviceStreams, EitherStreamFollowsTheOther) {
  for (const bool follows : {false, true}) {
    for (const bool blocks : {false, true}) {
      FakeDevice::Reset();
      SideStream side(FakeDevice::device());
      const at::Tensor x = at::ones({7}, FakeDevice::device());
      if (follows) side.FollowCurrentStream();
      {
        const SideStream::Scope scope(side);
        x.mul_(2);
      }
      if (blocks) side.BlockCurrentStream();
      x.add_(1);
      EXPECT_EQ(FakeDevice::Races().empty(), follows && blocks);
      EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
    }
  }
}

TEST_F(DeviceStreams, AnEventStandsForItsLastRecord) {
  const SideStream side(FakeDevice::device());
  DeviceEvent event;
  event.Record(FakeDevice::device());
  const at::Tensor x = at::ones({7}, FakeDevice::device());
  DeviceEvent moved = std::move(event);
  {
    const SideStream::Scope scope(side);
    moved.BlockCurrentStream();
    x.sum();
  }
  EXPECT_THAT(FakeDevice::Races(), ::testing::Not(IsEmpty()));
  FakeDevice::Reset();
  x.mul_(2);
  moved.Record(FakeDevice::device());
  {
    const SideStream::Scope scope(side);
    moved.BlockCurrentStream();
    x.sum();
  }
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(DeviceStreams, TheHostWaitsForAnEventUntilADeadline) {
  DeviceEvent event;
  event.Record(FakeDevice::device());
  {
    const FakeDevice::Stall stall;
    EXPECT_FALSE(event.Done());
    EXPECT_FALSE(event.Wait(absl::Now() + absl::Milliseconds(3)));
  }
  EXPECT_TRUE(event.Done());
  // Work that is done needs no time.
  EXPECT_TRUE(event.Wait(absl::InfinitePast()));
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
}

TEST_F(DeviceStreams, CopiesCrossWithoutAWaitOfTheHost) {
  const at::Tensor here = at::ones({3}, at::kLong);
  const at::Tensor there = CopyToDevice(here, FakeDevice::device());
  EXPECT_EQ(there.device(), FakeDevice::device());
  const HostCopy back = CopyToHost(there.mul(2));
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
  EXPECT_TRUE(back.is_there.Wait(absl::InfiniteFuture()));
  EXPECT_TRUE(back.values.equal(here * 2));
  EXPECT_TRUE(back.values.is_cpu());
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  EXPECT_TRUE(CopyToDevice(here, kCpu).is_same(here));
  EXPECT_TRUE(CopyToHost(here).values.equal(here));
}

TEST_F(DeviceStreams, DoNothingOnTheCpu) {
  const c10::Stream main = Current();
  EXPECT_FALSE(HasStreams(kCpu));
  EXPECT_TRUE(HasStreams(FakeDevice::device()));
  SideStream side(kCpu, SideStream::Priority::kHigh);
  side.FollowCurrentStream();
  side.BlockCurrentStream();
  EXPECT_EQ(side.device(), kCpu);
  const SideStream::Scope scope(side);
  EXPECT_EQ(Current(), main);
  DeviceEvent event;
  EXPECT_TRUE(event.Done());
  event.Record(kCpu);
  event.BlockCurrentStream();
  EXPECT_TRUE(event.Wait(absl::InfinitePast()));
  // The same holds after a record on another device.
  const FakeDevice::Stall stall;
  event.Record(FakeDevice::device());
  EXPECT_FALSE(event.Done());
  event.Record(kCpu);
  EXPECT_TRUE(event.Done());
}

}  // namespace
}  // namespace fsdp
