#include "base/device_streams.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <thread>

#include "absl/time/clock.h"

namespace fsdp {
namespace {

// Wait() polls this many times before it sleeps between polls.
constexpr int kEagerPolls = 1000;
constexpr absl::Duration kPause = absl::Microseconds(20);

}  // namespace

void Synchronize(c10::Device device) {
  if (!HasStreams(device)) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

at::Tensor CopyToDevice(const at::Tensor& tensor, c10::Device device) {
  if (device.is_cpu()) return tensor;
  const at::Tensor pinned =
      at::empty(tensor.sizes(), tensor.options().pinned_memory(true));
  pinned.copy_(tensor);
  return pinned.to(tensor.options().device(device), /*non_blocking=*/true);
}

HostCopy CopyToHost(const at::Tensor& tensor) {
  HostCopy copy;
  copy.values = at::empty(tensor.sizes(),
                          at::TensorOptions(tensor.scalar_type())
                              .pinned_memory(HasStreams(tensor.device())));
  copy.values.copy_(tensor, /*non_blocking=*/true);
  copy.is_there.Record(tensor.device());
  return copy;
}

void DeviceEvent::Record(c10::Device device) {
  if (device.is_cpu()) {
    if (event_.device_type() != c10::kCPU) event_ = c10::Event(c10::kCPU);
    return;
  }
  Record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

// An event stays on the device of its first record.
void DeviceEvent::Record(const c10::Stream& stream) {
  if (event_.device() != stream.device()) {
    event_ = c10::Event(stream.device_type());
  }
  event_.record(stream);
}

void DeviceEvent::BlockCurrentStream() const {
  if (event_.device_type() == c10::kCPU) return;
  const c10::impl::VirtualGuardImpl guard(event_.device_type());
  Block(guard.getStream(event_.device()));
}

void DeviceEvent::Block(const c10::Stream& stream) const {
  event_.block(stream);
}

// CUDA would set up GPU 0 for a thread that has chosen no device.
bool DeviceEvent::Done() const {
  if (event_.device_type() == c10::kCPU) return true;
  const c10::Device device = event_.device();
  if (!device.has_index()) return event_.query();  // nothing was recorded
  const c10::DeviceGuard guard(device);
  return event_.query();
}

bool DeviceEvent::Wait(absl::Time deadline) const {
  for (int polls = 0; !Done(); ++polls) {
    if (absl::Now() >= deadline) return false;
    if (polls < kEagerPolls) {
      std::this_thread::yield();
    } else {
      absl::SleepFor(kPause);
    }
  }
  return true;
}

SideStream::SideStream(c10::Device device, Priority priority)
    : device_(device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  stream_ = guard.getStreamFromGlobalPool(device, priority == Priority::kHigh);
}

SideStream::Scope::Scope(const SideStream& stream) {
  if (stream.stream_) guard_.reset_stream(*stream.stream_);
}

void SideStream::FollowCurrentStream() {
  if (!stream_) return;
  followed_.Record(device_);
  followed_.Block(*stream_);
}

void SideStream::BlockCurrentStream() {
  if (!stream_) return;
  last_.Record(*stream_);
  last_.BlockCurrentStream();
}

}  // namespace fsdp
