// A program in a workspace of its own that uses this repository as @libtorch_fsdp.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "base/torch_status.h"

int main() {
  const absl::Status status = fsdp::TorchToStatus("add", [] { at::ones({2}).add(at::ones({3})); });
  const std::string message(status.message());
  std::printf("LibTorch said: %s\n", message.c_str());
  return status.ok() ? 1 : 0;
}
