// Streams and events of whatever device, by LibTorch's device-generic
// interfaces. On the CPU, which executes at once, all of it does nothing.
#ifndef BASE_DEVICE_STREAMS_H_
#define BASE_DEVICE_STREAMS_H_

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
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

// What a device is given between two calls, recorded once and run again as a
// whole: at::cuda::CUDAGraph, whatever the device.

// Between BeginCapture() and EndCapture(), what is given to the current stream
// and to streams that wait for it is recorded and not run: memory holds what it
// held before. What these streams allocate comes from a pool of the graph's
// own, at addresses that no one else gets, and holds nothing before Replay().
// All other memory that is recorded has to stay for as long as there are
// replays. Refused, by the operation or by EndCapture():
//
//   waits of the host, and questions whether an event is reached
//   waits for events of before the capture; and, once it is over, for its own
//   work of a captured stream that the first stream does not wait for at last
//
// One capture of a device at a time. Used by one thread at a time, which is
// that of BeginCapture() until the capture is over.
class DeviceGraph {
 public:
  DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  // As Reset(); the device has run what was replayed, or frees its memory in
  // order.
  virtual ~DeviceGraph() = default;

  // Once, or after Reset(). The current stream is not the default one.
  virtual absl::Status BeginCapture() = 0;
  // On the stream of BeginCapture(). After an error nothing is captured.
  virtual absl::Status EndCapture() = 0;
  // Gives all of it to the current stream, any. After EndCapture().
  virtual absl::Status Replay() = 0;
  // Forgets what was captured, also in the middle of a capture.
  virtual void Reset() = 0;
};

using DeviceGraphMaker =
    std::function<absl::StatusOr<std::unique_ptr<DeviceGraph>>(c10::Device)>;

}  // namespace fsdp

#endif  // BASE_DEVICE_STREAMS_H_
