// Copies between the host and a device beside what the device computes, as
// ZeRO-Offload does (Ren et al., 2021): one stream up, one stream down.
#ifndef FSDP_DEVICE_COPIES_H_
#define FSDP_DEVICE_COPIES_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "base/device_streams.h"
#include "fsdp/buffer_pool.h"

namespace fsdp {

// Memory of the device is reused: there is as much as was in use at once. Host
// memory has to be page-locked, or else the host waits. Not thread-safe.
class DeviceCopies {
 public:
  explicit DeviceCopies(c10::Device device);
  ~DeviceCopies();

  // Memory of the device with the bytes of `host`, once `arrived` is reached,
  // which may not be written before. Begins when `host_ready` is reached.
  // Without `copies` the memory is of any content.
  absl::StatusOr<at::Tensor> Upload(const at::Tensor& host, bool copies,
                                    const DeviceEvent& host_ready,
                                    DeviceEvent& arrived);
  // Takes back what Upload() gave, after what the current stream has been given
  // until now; with `copies`, its bytes go to `host`, once `arrived` is reached.
  void Release(const at::Tensor& memory, const at::Tensor& host, bool copies,
               DeviceEvent& arrived);

  BufferPool::Stats stats() const { return memory_.stats(); }

 private:
  const c10::Device device_;
  SideStream up_;
  SideStream down_;
  BufferPool memory_;
};

}  // namespace fsdp

#endif  // FSDP_DEVICE_COPIES_H_
