// Captures of what a device is given, to run it again as a whole.
#ifndef BASE_DEVICE_GRAPH_H_
#define BASE_DEVICE_GRAPH_H_

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace fsdp {

// Records what a device is given between two calls, to run it again as a whole:
// at::cuda::CUDAGraph for any device.
//
// Between BeginCapture() and EndCapture(), the work of the current stream, and
// of streams that wait for it, is recorded and not run: memory keeps its
// content. What these streams allocate comes from a pool of the graph's own, at
// addresses that nobody else gets, and holds nothing before Replay(). All other
// memory that is recorded has to stay as long as there are replays. The
// operation itself or EndCapture() refuses
//
//   - waits of the host, and questions whether an event is reached
//   - waits for events from before the capture and, once it is over, for work
//     in it of a captured stream that the first stream does not wait for in the
//     end
//
// A device has one capture at a time. Used by one thread at a time, in a
// capture by that of BeginCapture().
class DeviceGraph {
 public:
  DeviceGraph() = default;
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;
  // Resets. The device must have run the replays, or free their memory in
  // order.
  virtual ~DeviceGraph() = default;

  // Call it once, or after Reset(), on a stream that is not the default one.
  virtual absl::Status BeginCapture() = 0;
  // Call it on the stream of BeginCapture(). After an error nothing is
  // captured.
  virtual absl::Status EndCapture() = 0;
  // Gives all of it to the current stream, whichever it is, after EndCapture().
  virtual absl::Status Replay() = 0;
  // Forgets what was captured, even in the middle of a capture.
  virtual void Reset() = 0;
};

// Makes an empty graph for a device, as MakeCudaGraph() does.
using DeviceGraphMaker =
    std::function<absl::StatusOr<std::unique_ptr<DeviceGraph>>(c10::Device)>;

// Makes a graph that is an at::cuda::CUDAGraph. A capture restricts only its
// own thread; the threads of autograd and NCCL go on. Replays draw new random
// numbers from the default generator. InvalidArgument: `device` is not a GPU.
// Link //base:cuda_graph.
absl::StatusOr<std::unique_ptr<DeviceGraph>> MakeCudaGraph(c10::Device device);

}  // namespace fsdp

#endif  // BASE_DEVICE_GRAPH_H_
