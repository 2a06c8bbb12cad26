#include "fsdp/device_copies.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"

namespace fsdp {

DeviceCopies::DeviceCopies(c10::Device device)
    : device_(device),
      up_(device),
      down_(device),
      memory_([device](int64_t bytes) -> absl::StatusOr<at::Tensor> {
        at::Tensor memory;
        FSDP_RETURN_IF_ERROR(TorchToStatus("allocating memory for copies", [&] {
          memory =
              at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
        }));
        return memory;
      }) {}

// Memory goes back to the stream that it was allocated on, behind what the
// other has been given.
DeviceCopies::~DeviceCopies() {
  down_.BlockCurrentStream();
  up_.FollowCurrentStream();
}

absl::StatusOr<at::Tensor> DeviceCopies::Upload(const at::Tensor& host,
                                                bool copies,
                                                const DeviceEvent& host_ready,
                                                DeviceEvent& arrived) {
  const c10::NoGradGuard no_grad;
  const SideStream::Scope beside(up_);
  host_ready.BlockCurrentStream();
  const auto bytes = static_cast<int64_t>(host.nbytes());
  FSDP_ASSIGN_OR_RETURN(const at::Tensor memory, memory_.Acquire(bytes));
  if (copies) {
    const absl::Status copied = TorchToStatus("copying to the device", [&] {
      memory.narrow(0, 0, bytes).copy_(host, /*non_blocking=*/true);
    });
    if (!copied.ok()) {
      memory_.Release(memory);
      return copied;
    }
  }
  arrived.Record(device_);
  return memory;
}

void DeviceCopies::Release(const at::Tensor& memory, const at::Tensor& host,
                           bool copies, DeviceEvent& arrived) {
  const c10::NoGradGuard no_grad;
  down_.FollowCurrentStream();
  const SideStream::Scope beside(down_);
  if (copies) {
    host.copy_(memory.narrow(0, 0, static_cast<int64_t>(host.nbytes())),
               /*non_blocking=*/true);
  }
  arrived.Record(device_);
  DeviceEvent used;
  used.Record(device_);
  memory_.Release(memory, /*reader=*/nullptr, std::move(used));
}

}  // namespace fsdp
