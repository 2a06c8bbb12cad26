// Streams and events of any device, by LibTorch's device-generic interfaces. On
// the CPU, which executes at once, they do nothing.
#ifndef BASE_DEVICE_STREAMS_H_
#define BASE_DEVICE_STREAMS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

#include "absl/time/time.h"

namespace fsdp {

// Returns whether the host only queues what `device` computes.
inline bool HasStreams(c10::Device device) { return !device.is_cpu(); }

// Blocks the host until the device has done all that it was given.
void Synchronize(c10::Device device);

// A point in the work of a stream. Used by one thread at a time.
class DeviceEvent {
 public:
  // An event that was not recorded is done.
  DeviceEvent() = default;

  // Records the point that the current stream of `device` has reached, and
  // forgets the former one. Recording again is cheap.
  void Record(c10::Device device);

  // The same for `stream`, which need not be current.
  void Record(const c10::Stream& stream);

  // Makes the current stream's later work wait for the point, and not the host.
  void BlockCurrentStream() const;
  // The same for `stream`, on the event's device.
  void Block(const c10::Stream& stream) const;

  // Returns the device of the recorded point.
  c10::Device device() const { return event_.device(); }
  bool Done() const;

  // Blocks the host by polling. Returns false if the point is not reached at
  // `deadline`.
  bool Wait(absl::Time deadline) const;

 private:
  c10::Event event_{c10::kCPU};  // the CPU has no events
};

// An event that several wait for, such as the end of a copy; null: there is
// nothing to wait for.
using SharedEvent = std::shared_ptr<const DeviceEvent>;

// Returns a copy of `tensor`, which is on the CPU, on `device`, by way of
// page-locked memory, so that the host does not wait; on the CPU `tensor`.
at::Tensor CopyToDevice(const at::Tensor& tensor, c10::Device device);

// Values on their way to the host: they are there when `is_there` is reached.
struct HostCopy {
  at::Tensor values;  // page-locked if they come from a device
  DeviceEvent is_there;
};

// Starts to copy `tensor`, without waiting.
HostCopy CopyToHost(const at::Tensor& tensor);

// A stream beside the one that computes. A device's pool may give one stream to
// several, whose work is then ordered more than asked. Used by one thread at a
// time.
class SideStream {
 public:
  enum class Priority { kNormal, kHigh };

  explicit SideStream(c10::Device device,
                      Priority priority = Priority::kNormal);

  c10::Device device() const { return device_; }

  // While it exists, the stream and its device are the current ones in this
  // thread.
  class Scope {
   public:
    explicit Scope(const SideStream& stream);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    c10::OptionalStreamGuard guard_;
  };

  // Makes later work of this stream wait for the current stream's work so far.
  void FollowCurrentStream();
  // Makes later work of the current stream wait for this stream's work so far.
  void BlockCurrentStream();

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  // none on the CPU
  DeviceEvent followed_;
  DeviceEvent last_;
};

}  // namespace fsdp

#endif  // BASE_DEVICE_STREAMS_H_
