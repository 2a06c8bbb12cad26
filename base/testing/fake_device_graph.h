// Captures of the fake device (base/device_streams.h).
#ifndef BASE_TESTING_FAKE_DEVICE_GRAPH_H_
#define BASE_TESTING_FAKE_DEVICE_GRAPH_H_

#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/device_graph.h"

namespace fsdp::testing {

namespace fake_device {
class Capture;
}  // namespace fake_device

// Does to values, memory and streams what a CUDA graph does. Captured work has
// not run; memory of the graph's own holds NaN before the first replay and is
// not reused; only the events of the capture order streams in replays; random
// numbers go on. Refuses what CUDA refuses, and also work on streams that are
// not captured, which CUDA would run at once. Refuses replays if recorded
// memory of others has been freed. FakeDevice::Races() tells races in replays;
// a capture is no access.
class FakeDeviceGraph final : public DeviceGraph {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceGraph>> Make(c10::Device device);

  FakeDeviceGraph();
  ~FakeDeviceGraph() override;

  absl::Status BeginCapture() override;
  absl::Status EndCapture() override;
  absl::Status Replay() override;
  void Reset() override;

  // Returns the captured operations, a line each. Captures of equal operations
  // on equal memory have equal lines.
  std::vector<std::string> Operations() const;

 private:
  std::shared_ptr<fake_device::Capture> capture_;
  bool is_over_ = false;
  std::map<int64_t, int> actors_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_FAKE_DEVICE_GRAPH_H_
