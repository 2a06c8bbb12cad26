// Streams, events, memory and hooks of the fake device.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "base/testing/fake_device_state.h"

namespace fsdp::testing::fake_device {
namespace {

c10::Stream StreamOf(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, TheDevice(), id);
}

const Point& PointOf(void* event) { return *static_cast<Point*>(event); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return TheDevice().type(); }
  c10::Device exchangeDevice(c10::Device /*device*/) const override {
    return TheDevice();
  }
  c10::Device getDevice() const override { return TheDevice(); }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device /*device*/) const override {
    return StreamOf(State::CurrentStream());
  }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override {
    return StreamOf(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/,
                                      bool high_priority) const override {
    return StreamOf(State::Get().NewStream(/*from_pool=*/true, high_priority));
  }
  c10::Stream getNewStream(c10::Device /*device*/,
                           int priority) const override {
    return StreamOf(State::Get().NewStream(/*from_pool=*/false, priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    State::Get().Count(&FakeDevice::Calls::stream_switches);
    return StreamOf(State::ExchangeStream(stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    State& state = State::Get();
    if (state.Stalled()) return false;
    state.Learn(state.Record(stream.id()));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    State::Get().HostWaitForStream(stream.id(), "synchronize a stream");
  }
  void synchronizeDevice(const c10::DeviceIndex /*index*/) const override {
    State::Get().HostWaitForAll("synchronize the device");
  }

  void record(void** event, const c10::Stream& stream,
              const c10::DeviceIndex /*index*/,
              const c10::EventFlag /*flag*/) const override {
    State::Get().Count(&FakeDevice::Calls::events_recorded);
    if (*event == nullptr) *event = new Point;
    *static_cast<Point*>(*event) = State::Get().Record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    State::Get().Count(&FakeDevice::Calls::event_waits);
    State::Get().Block(stream.id(), PointOf(event));
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    if (State::Get().Stalled()) return false;
    State::Get().Learn(PointOf(event));
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    State::Get().HostWait(PointOf(event), "synchronize an event");
  }
  void destroyEvent(void* event,
                    const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Point*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data,
                             const c10::Stream& stream) const override {
    State::Get().RecordOnStream(data.get(), stream.id());
  }
};

// Memory of the device, or pinned memory of the host.
template <bool kPinned>
class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (kPinned) return State::Get().AllocatePinned(bytes);
    return State::Get().Adopt(c10::GetCPUAllocator()->allocate(bytes), bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(
      c10::DeviceIndex /*index*/) const override {
    return 0;
  }
  c10::Device getDeviceFromPtr(void* /*data*/) const override {
    return TheDevice();
  }
  // Random numbers are those of the CPU.
  const at::Generator& getDefaultGenerator(
      c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override {
    return State::Get().IsPinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const allocator = new Memory</*kPinned=*/true>;
    return allocator;
  }
};

}  // namespace

c10::Allocator* DeviceAllocator() {
  static auto* const allocator = new Memory</*kPinned=*/false>;
  return allocator;
}

// LibTorch keeps what it is given for the life of the process.
void RegisterRuntime() {
  const c10::DeviceType type = TheDevice().type();
  // The device has this name anyway, but others ask whether it is set.
  c10::register_privateuse1_backend("privateuseone");
  c10::SetAllocator(type, DeviceAllocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::impl::registerDeviceGuard(type, new Guard);
}

}  // namespace fsdp::testing::fake_device
