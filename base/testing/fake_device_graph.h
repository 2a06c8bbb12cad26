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
#include "base/device_streams.h"

namespace fsdp::testing {

namespace fake_device {
class Capture;
}  // namespace fake_device

// Does to values, memory and streams what a CUDA graph does: what was captured
// has not run, memory of the graph's own holds NaN before the first replay and
// is not reused, streams are ordered in replays by the events of the capture
// alone, and random numbers go on. Refuses what CUDA refuses, work on streams
// that are not captured besides, which CUDA would run at once. Where memory of
// others that was recorded has been freed, replays are refused. Races in
// replays are told by FakeDevice::Races(); a capture is no access.
class FakeDeviceGraph final : public DeviceGraph {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceGraph>> Make(c10::Device device);

  FakeDeviceGraph();
  ~FakeDeviceGraph() override;

  absl::Status BeginCapture() override;
  absl::Status EndCapture() override;
  absl::Status Replay() override;
  void Reset() override;

  // The captured operations, a line each: captures of equal operations on equal
  // memory have equal lines.
  std::vector<std::string> Operations() const;

 private:
  std::shared_ptr<fake_device::Capture> capture_;
  bool is_over_ = false;
  std::map<int64_t, int> actors_;
};

}  // namespace fsdp::testing

#endif  // BASE_TESTING_FAKE_DEVICE_GRAPH_H_
