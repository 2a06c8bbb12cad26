// What a device is given between two calls, recorded once and run again as a
// whole: at::cuda::CUDAGraph, whatever the device.
#ifndef BASE_DEVICE_GRAPH_H_
#define BASE_DEVICE_GRAPH_H_

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

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

#endif  // BASE_DEVICE_GRAPH_H_
