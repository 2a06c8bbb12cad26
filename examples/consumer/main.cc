// A program in a workspace of its own that uses this repository as
// @libtorch_fsdp: it shards a module over one rank and takes a step.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "base/status_error.h"
#include "base/torch_status.h"
#include "comm/local/local_communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"

void Step() {
  auto ranks = fsdp::ValueOrThrow(fsdp::comm::CreateLocalGroup(1));
  auto model = fsdp::ValueOrThrow(
      fsdp::FullyShard(torch::nn::Linear(3, 2), std::move(ranks[0])));
  fsdp::ThrowIfError(model->Backward(model->forward(at::ones({4, 3})).sum()));
  std::printf("%s", model->Describe().c_str());
}

int main() {
  const absl::Status status = fsdp::TorchToStatus("a step", Step);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
