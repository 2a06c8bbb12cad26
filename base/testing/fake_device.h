// A device in host memory, for tests of stream code where there is no GPU, and
// its graphs.
#ifndef BASE_TESTING_FAKE_DEVICE_H_
#define BASE_TESTING_FAKE_DEVICE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/device_graph.h"

namespace fsdp::testing {

// LibTorch's PrivateUse1 device, "privateuseone:0": every operator that the CPU
// has, with the CPU's bits; streams, events and stream pools by LibTorch's
// device-generic interfaces; a thread of autograd's engine of its own. All
// executes at once, so values never tell of a missing wait. What does:
//
//   Races. Each operator's reads and writes are accesses of its stream, and
//   two that overlap, one a write, need an event or a host wait between them
//   (HappensBefore). Allocating and freeing count as writes on the stream that
//   was current at the allocation: a caching allocator hands freed memory to
//   that stream's next allocation at once. Freed memory waits for the streams
//   that recordDataPtrOnStream() named.
//   Host waits. What makes the host wait on a real device is listed: values
//   read by the host, sizes that depend on values, copies that are not
//   non_blocking or whose host memory is not pinned, synchronisations. Polling
//   an event orders but is not listed. Copies between host and device that are
//   non_blocking read and write host memory on their stream, pinned or not. The
//   host's own accesses to it are seen only by HostRead() and HostWrite().
//
// Threads share one host: what orders them is not this detector's business.
// Thread-safe.
class FakeDevice {
 public:
  // Registers the device, before the first backward of the process. Further
  // calls do nothing.
  static void Register();
  static c10::Device device();

  // Brings tensors to the device that others hold, too, above all parameters of
  // a module: LibTorch's set_data(), and so Module::to(), cannot go from
  // another device to PrivateUse1.
  static void Move(const std::vector<at::Tensor>& tensors);

  // Forgets races, host waits, calls and accesses. The peak becomes the bytes
  // in use.
  static void Reset();

  // Returns a line for each pair of operations that race: both and their
  // streams.
  static std::vector<std::string> Races();
  // Returns a line for each time the host waited.
  static std::vector<std::string> HostWaits();
  // Counts what the host has asked of the device since Reset().
  struct Calls {
    int64_t operators = 0;  // launches of kernels and copies; views are none
    int64_t stream_switches = 0;
    int64_t events_recorded = 0;
    int64_t event_waits = 0;  // of streams
    int64_t allocations = 0;
  };
  static Calls calls();
  static int64_t bytes_in_use();
  static int64_t peak_bytes();

  // Pins memory of the host until Unpin(), like LibTorch's pinned allocations.
  static void Pin(void* memory, int64_t bytes);
  static void Unpin(void* memory);

  // Notes an access on the current stream, for fakes of what torch does not
  // see.
  static void Touch(const at::Tensor& tensor, bool writes,
                    absl::string_view what);
  // Notes an access of the host to its own memory or the device's.
  static void HostRead(const at::Tensor& tensor, absl::string_view what);
  static void HostWrite(const at::Tensor& tensor, absl::string_view what);

  // While this exists, queries find no event and no stream done. Waits of the
  // host that cannot be polled end all the same.
  class Stall {
   public:
    Stall();
    ~Stall();
    Stall(const Stall&) = delete;
    Stall& operator=(const Stall&) = delete;
  };
};

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

#endif  // BASE_TESTING_FAKE_DEVICE_H_
