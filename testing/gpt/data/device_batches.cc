#include "testing/gpt/data/device_batches.h"

#include <ATen/ops/empty.h>

namespace gpt {
namespace {

at::Tensor Copied(const at::Tensor& tensor, c10::Device device) {
  const at::Tensor pinned =
      at::empty(tensor.sizes(), tensor.options().pinned_memory(true));
  pinned.copy_(tensor);
  return pinned.to(tensor.options().device(device), /*non_blocking=*/true);
}

}  // namespace

Batch ToDevice(const Batch& batch, c10::Device device) {
  if (device.is_cpu()) return batch;
  return {Copied(batch.inputs, device), Copied(batch.targets, device)};
}

}  // namespace gpt
