#include "base/device_streams.h"

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace fsdp {
namespace {

c10::Stream CurrentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

bool HasStreams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

void DeviceEvent::Record(c10::Device device) {
  if (!HasStreams(device)) return;
  if (event_ == nullptr || event_->device_type() != device.type()) {
    event_ = std::make_unique<c10::Event>(device.type());
  }
  event_->record(CurrentStream(device));
}

void DeviceEvent::BlockCurrentStream() const {
  if (event_ != nullptr) event_->block(CurrentStream(event_->device()));
}

bool DeviceEvent::IsReached() const {
  return event_ == nullptr || event_->query();
}

// Asks instead of waiting in the device's own call, which knows no deadline.
absl::Status DeviceEvent::Wait(absl::Time deadline,
                               absl::string_view what) const {
  constexpr absl::Duration kLongestPause = absl::Milliseconds(1);
  absl::Duration pause = absl::Microseconds(10);
  while (!IsReached()) {
    if (absl::Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat(what, ": the device has not come to it in time"));
    }
    absl::SleepFor(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
  return absl::OkStatus();
}

SideStream::SideStream(c10::Device device, Priority priority)
    : device_(device) {
  if (!HasStreams(device)) return;
  stream_ = c10::impl::VirtualGuardImpl(device.type())
                .getStreamFromGlobalPool(device, priority == Priority::kHigh);
}

SideStream::Scope::Scope(SideStream& stream) {
  if (!stream.stream_) return;
  stream.entered_.Record(stream.device_);
  guard_.reset_stream(*stream.stream_);
  stream.entered_.BlockCurrentStream();
}

void SideStream::BlockCurrentStream() {
  if (!stream_) return;
  {
    const c10::OptionalStreamGuard guard(*stream_);
    left_.Record(device_);
  }
  left_.BlockCurrentStream();
}

}  // namespace fsdp
