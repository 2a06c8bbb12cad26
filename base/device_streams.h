// Streams and events of whatever device, by LibTorch's device-generic
// interfaces. On the CPU, which executes at once, all of it does nothing.
#ifndef BASE_DEVICE_STREAMS_H_
#define BASE_DEVICE_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

#include "absl/time/time.h"

namespace fsdp {

// Whether the host only queues what `device` computes.
inline bool HasStreams(c10::Device device) { return !device.is_cpu(); }

// Blocks the host until the device has done all that it was given.
void Synchronize(c10::Device device);

// A point in the work of a stream. Used by one thread at a time.
class DeviceEvent {
 public:
  // Not recorded: done.
  DeviceEvent() = default;

  // The point that the current stream of `device` has reached; forgets the
  // former one. Cheap where the event is used again.
  void Record(c10::Device device);

  // The same of `stream`, which need not be current.
  void Record(const c10::Stream& stream);

  // The current stream of the device does what comes from now on after that
  // point. The host does not wait.
  void BlockCurrentStream() const;
  // The same of `stream`, which is one of the recorded event's device.
  void Block(const c10::Stream& stream) const;

  bool Done() const;

  // Blocks the host by polling; false when the point is not reached at
  // `deadline`.
  bool Wait(absl::Time deadline) const;

 private:
  c10::Event event_{c10::kCPU};  // which has none
};

// One that several wait for, such as the end of a copy; null: nothing to wait
// for.
using SharedEvent = std::shared_ptr<const DeviceEvent>;

// A stream beside the one that computes. Streams of a device's pool may be
// shared: what runs on them is ordered by more than was asked for. Used by one
// thread at a time.
class SideStream {
 public:
  enum class Priority { kNormal, kHigh };

  explicit SideStream(c10::Device device,
                      Priority priority = Priority::kNormal);

  c10::Device device() const { return device_; }

  // While it exists, the stream is the current one of its device in this
  // thread, and so is the device.
  class Scope {
   public:
    explicit Scope(const SideStream& stream);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    c10::OptionalStreamGuard guard_;
  };

  // This stream does what comes from now on after what the current one has been
  // given.
  void FollowCurrentStream();
  // The current stream does what comes from now on after what this one has been
  // given.
  void BlockCurrentStream();

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  // none on the CPU
  DeviceEvent followed_;
  DeviceEvent last_;
};

}  // namespace fsdp

#endif  // BASE_DEVICE_STREAMS_H_
