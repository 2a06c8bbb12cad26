#include "base/testing/fake_device.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

c10::impl::VirtualGuardImpl Device() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1);
}

c10::Stream Current() { return Device().getStream(FakeDevice::device()); }

// `to` waits for what `from` has done so far.
void Order(const c10::Stream& from, const c10::Stream& to) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(from);
  event.block(to);
}

struct Registered {
  Registered() {
    FakeDevice::Register();
    FakeDevice::Reset();
  }
};

class FakeDeviceTest : public ::testing::Test {
 private:
  const Registered registered_;  // before the streams

 protected:
  static at::TensorOptions Options() {
    return at::TensorOptions(at::kFloat).device(FakeDevice::device());
  }
  static at::Tensor Ones(int64_t size) { return at::ones({size}, Options()); }

  const c10::Stream main_ = Current();
  const c10::Stream side_ =
      Device().getStreamFromGlobalPool(FakeDevice::device(), true);
};

// Runs `fn` on `stream`.
template <typename Fn>
void On(const c10::Stream& stream, Fn fn) {
  const c10::StreamGuard guard(stream);
  fn();
}

using FakeDeviceOperators = FakeDeviceTest;
using FakeDeviceRaces = FakeDeviceTest;
using FakeDeviceHostWaits = FakeDeviceTest;
using FakeDeviceMemory = FakeDeviceTest;
using FakeDeviceBackward = FakeDeviceTest;

TEST_F(FakeDeviceOperators, OutTensorsGrowInPlace) {
  const at::Tensor x = Ones(7);
  at::Tensor out = at::empty({0}, Options());
  const at::Tensor alias = out;
  at::add_out(out, x, x);
  EXPECT_EQ(alias.sizes(), at::IntArrayRef({7}));
  EXPECT_EQ(alias.cpu().sum().item<float>(), 14);
  out.resize_({100});
  EXPECT_EQ(out.device(), FakeDevice::device());
  EXPECT_EQ(out.slice(0, 0, 7).cpu().sum().item<float>(), 14);
  at::Tensor other = at::empty({0}, Options());
  other.set_(x);
  EXPECT_TRUE(other.is_alias_of(x));
  other.set_(x.storage(), 3, {2}, {1});
  EXPECT_EQ(other.storage_offset(), 3);
}

TEST_F(FakeDeviceOperators, RefuseToMixDevicesExceptForScalars) {
  const at::Tensor x = Ones(7);
  EXPECT_EQ(x.add(at::scalar_tensor(2.0)).cpu()[0].item<float>(), 3);
  EXPECT_THROW(x.add(at::ones({7})), c10::Error);
  EXPECT_THROW(at::cat({x, at::ones({7})}), c10::Error);
}

TEST_F(FakeDeviceRaces, AReadThatDoesNotWaitForTheWrite) {
  for (const bool waits : {false, true}) {
    FakeDevice::Reset();
    const at::Tensor x = at::zeros({7}, Options());
    at::Tensor y;
    Order(main_, side_);
    On(side_, [&] { at::Tensor(x).fill_(2); });
    if (waits) Order(side_, main_);
    y = x.add(1);
    if (waits) {
      EXPECT_THAT(FakeDevice::Races(), IsEmpty());
    } else {
      EXPECT_THAT(FakeDevice::Races(),
                  ElementsAre(AllOf(HasSubstr("aten::add on stream 0 reads"),
                                    HasSubstr("aten::fill_ on stream"),
                                    HasSubstr("28 bytes"))));
    }
  }
}

TEST_F(FakeDeviceRaces, MemoryFreedWhileAnotherStreamUsesIt) {
  enum class Care { kNone, kEvent, kRecordStream };
  for (const Care care : {Care::kNone, Care::kEvent, Care::kRecordStream}) {
    FakeDevice::Reset();
    at::Tensor sum;
    {
      const at::Tensor x = Ones(7);
      Order(main_, side_);
      On(side_, [&] { sum = x.sum(); });
      if (care == Care::kEvent) Order(side_, main_);
      if (care == Care::kRecordStream) x.record_stream(side_);
    }
    if (care == Care::kNone) {
      EXPECT_THAT(FakeDevice::Races(),
                  ElementsAre(AllOf(HasSubstr("free on stream 0 writes"),
                                    HasSubstr("aten::sum on stream"))));
    } else {
      EXPECT_THAT(FakeDevice::Races(), IsEmpty());
    }
  }
}

TEST_F(FakeDeviceRaces, MemoryUsedBeforeTheStreamItWasAllocatedOnIsReady) {
  at::Tensor x = at::empty({7}, Options());
  On(side_, [&] { x.zero_(); });
  EXPECT_THAT(FakeDevice::Races(),
              ElementsAre(HasSubstr("aten::empty on stream 0")));
}

TEST_F(FakeDeviceRaces, DisjointColumnsAreNoRace) {
  const at::Tensor x = at::zeros({13, 4}, Options());
  Order(main_, side_);
  On(side_, [&] { x.narrow(1, 0, 2).fill_(1); });
  x.narrow(1, 2, 2).fill_(2);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  x.narrow(1, 1, 1).fill_(3);
  EXPECT_THAT(FakeDevice::Races(), SizeIs(1));
}

TEST_F(FakeDeviceRaces, TheHostReadsBeforeACopyHasLanded) {
  for (const bool pinned : {false, true}) {
    for (const bool waits : {false, true}) {
      FakeDevice::Reset();
      const at::Tensor x = Ones(7);
      at::Tensor host =
          at::empty({7}, at::TensorOptions(at::kFloat).pinned_memory(pinned));
      ASSERT_EQ(host.is_pinned(), pinned);
      host.copy_(x, /*non_blocking=*/true);
      EXPECT_THAT(FakeDevice::HostWaits(), SizeIs(pinned ? 0 : 1));
      c10::Event event(c10::DeviceType::PrivateUse1);
      event.record(main_);
      if (waits) {
        EXPECT_TRUE(event.query());
      }
      FakeDevice::HostRead(host, "optimizer");
      EXPECT_THAT(FakeDevice::Races(), SizeIs(waits ? 0 : 1));
    }
  }
}

TEST_F(FakeDeviceRaces, MemoryIsUnpinnedBeforeACopyHasLanded) {
  for (const bool waits : {false, true}) {
    FakeDevice::Reset();
    const at::Tensor x = Ones(7);
    const at::Tensor host = at::empty({7});
    FakeDevice::Pin(host.mutable_data_ptr(),
                    static_cast<int64_t>(host.nbytes()));
    ASSERT_TRUE(host.is_pinned());
    host.copy_(x, /*non_blocking=*/true);
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(main_);
    if (waits) {
      EXPECT_TRUE(event.query());
    }
    FakeDevice::Unpin(host.mutable_data_ptr());
    EXPECT_FALSE(host.is_pinned());
    EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
    EXPECT_THAT(FakeDevice::Races(), SizeIs(waits ? 0 : 1));
  }
}

TEST_F(FakeDeviceRaces, TheHostOverwritesWhatIsStillBeingCopied) {
  const at::Tensor host = at::ones({7});
  at::Tensor x = at::empty({7}, Options());
  FakeDevice::HostWrite(host, "step");
  x.copy_(host, /*non_blocking=*/true);
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
  FakeDevice::HostWrite(host, "next step");
  EXPECT_THAT(FakeDevice::Races(),
              ElementsAre(AllOf(HasSubstr("next step on the host writes"),
                                HasSubstr("copy from the host"))));
}

TEST_F(FakeDeviceRaces, TouchIsAnAccessOfTheCurrentStream) {
  const at::Tensor x = Ones(7);
  Order(main_, side_);
  FakeDevice::Touch(x, /*writes=*/false, "send");
  On(side_, [&] { FakeDevice::Touch(x, /*writes=*/true, "receive"); });
  EXPECT_THAT(FakeDevice::Races(),
              ElementsAre(AllOf(HasSubstr("receive on stream"),
                                HasSubstr("send on stream 0 reads"))));
}

TEST_F(FakeDeviceHostWaits, AreListedByTheOperatorThatMakesThem) {
  at::Tensor x = Ones(7);
  const at::Tensor mask = x > 0;
  x.mul_(2).add_(x.sum()).clamp_(0, 3);
  at::masked_fill(x, mask, 1.0);
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());

  (void)x[0].item<float>();
  (void)x.cpu();
  (void)at::ones({3}).to(FakeDevice::device());
  (void)x.equal(x);
  (void)x.index({mask});
  (void)mask.nonzero();
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(main_);
  event.synchronize();
  main_.synchronize();
  Device().synchronizeDevice(0);
  EXPECT_THAT(FakeDevice::HostWaits(),
              ElementsAre(HasSubstr("_local_scalar_dense"), "copy to the host",
                          "copy from the host", "aten::equal", "aten::index",
                          "aten::nonzero", "synchronize an event",
                          "synchronize a stream", "synchronize the device"));
}

TEST_F(FakeDeviceHostWaits, IndicesOfTheDeviceNeedNone) {
  const at::Tensor x = Ones(7);
  const at::Tensor indices = at::zeros({3}, Options().dtype(at::kLong));
  EXPECT_EQ(x.index({indices}).numel(), 3);
  EXPECT_THAT(FakeDevice::HostWaits(), IsEmpty());
}

TEST_F(FakeDeviceHostWaits, OrderWhatComesAfterThem) {
  const at::Tensor x = Ones(7);
  (void)x.cpu();
  On(side_, [&] { x.mul_(2); });
  EXPECT_THAT(FakeDevice::Races(), IsEmpty());
}

TEST_F(FakeDeviceHostWaits, NothingIsDoneDuringAStall) {
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(main_);
  {
    const FakeDevice::Stall stall;
    EXPECT_FALSE(event.query());
    EXPECT_FALSE(main_.query());
  }
  EXPECT_TRUE(event.query());
  EXPECT_TRUE(main_.query());
}

TEST_F(FakeDeviceMemory, IsCounted) {
  const int64_t before = FakeDevice::bytes_in_use();
  {
    const at::Tensor x = at::empty({1000}, Options());
    const at::Tensor y = x.add(1);  // made by the CPU's kernel
    EXPECT_EQ(FakeDevice::bytes_in_use() - before, 8000);
  }
  EXPECT_EQ(FakeDevice::bytes_in_use(), before);
  EXPECT_EQ(FakeDevice::peak_bytes() - before, 8000);
  FakeDevice::Reset();
  EXPECT_EQ(FakeDevice::peak_bytes(), before);
}

TEST_F(FakeDeviceMemory, StreamsAreOfTheirThread) {
  On(side_, [&] {
    EXPECT_EQ(Current(), side_);
    std::thread([&] { EXPECT_EQ(Current(), main_); }).join();
  });
  EXPECT_EQ(Current(), main_);
  EXPECT_NE(Device().getNewStream(FakeDevice::device()),
            Device().getNewStream(FakeDevice::device()));
}

TEST_F(FakeDeviceBackward, RunsOnAThreadOfTheDevice) {
  at::Tensor x = Ones(7).requires_grad_();
  std::thread::id ran;
  const at::Tensor y = x.mul(2);
  y.register_hook(
      [&ran](const at::Tensor&) { ran = std::this_thread::get_id(); });
  y.sum().backward();
  EXPECT_NE(ran, std::this_thread::get_id());
  EXPECT_NE(ran, std::thread::id());
  EXPECT_EQ(x.grad().cpu().sum().item<float>(), 14);
}

}  // namespace
}  // namespace fsdp::testing
