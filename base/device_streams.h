// Order between the streams of a device, for code that knows no kind of device
// by name. A CPU has no streams: there, all of this does nothing.
#ifndef BASE_DEVICE_STREAMS_H_
#define BASE_DEVICE_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace fsdp {

// Whether the host only queues what `device` computes.
bool HasStreams(c10::Device device);

// A point that a stream reaches. Not thread-safe.
class DeviceEvent {
 public:
  // Reached from the start.
  DeviceEvent() = default;

  // Becomes the point behind what the current stream of `device` has been given
  // until now.
  void Record(c10::Device device);
  // What the current stream is given from now on waits for it; the host does
  // not.
  void BlockCurrentStream() const;
  bool IsReached() const;
  // Blocks the host. DeadlineExceeded names `what`.
  absl::Status Wait(absl::Time deadline, absl::string_view what) const;

 private:
  std::unique_ptr<c10::Event> event_;
};

// A stream beside the current one. Not thread-safe.
class SideStream {
 public:
  enum class Priority { kNormal, kHigh };
  SideStream(c10::Device device, Priority priority);

  // While it lives, the stream is the current one of its device. It begins
  // behind what the stream that was current has been given.
  class Scope {
   public:
    explicit Scope(SideStream& stream);

   private:
    c10::OptionalStreamGuard guard_;
  };

  // What the current stream is given from now on waits for all that this one
  // has been given.
  void BlockCurrentStream();

 private:
  const c10::Device device_;
  c10::optional<c10::Stream> stream_;  // none: nothing to do
  DeviceEvent entered_;
  DeviceEvent left_;
};

}  // namespace fsdp

#endif  // BASE_DEVICE_STREAMS_H_
