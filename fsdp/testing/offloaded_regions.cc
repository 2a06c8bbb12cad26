#include "fsdp/testing/offloaded_regions.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tanh.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/torch_status.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/recompute/checkpoint.h"
#include "fsdp/testing/activation_offload_calls.h"
#include "fsdp/testing/toy_model.h"
#include "offload/host_store.h"
#include "offload/param_store.h"
#include "offload/testing/kept_file.h"

namespace fsdp::offloaded_regions {

using ::fsdp::offload::HostStore;
using ::fsdp::offload::testing::TemporaryFile;
using ::fsdp::testing::FillParameters;
using ::fsdp::testing::Make;
using ::fsdp::testing::SmallOptions;

std::unique_ptr<ParamStore> Host(int64_t regions) {
  return HostStore::Make(regions * offload::kPageBytes).value();
}

std::unique_ptr<ParamStore> File() {
  return TemporaryFile(64 * offload::kPageBytes);
}

std::shared_ptr<ActivationOffload> Offload(std::unique_ptr<ParamStore> store,
                                           absl::Duration timeout) {
  ActivationOffloadOptions options = SmallOptions();
  options.timeout = timeout;
  return Make(std::move(store), options);
}

CheckpointOptions With(std::shared_ptr<ActivationOffload> offload) {
  CheckpointOptions options;
  options.offload = std::move(offload);
  return options;
}

WeakStorage MemoryOf(const at::Tensor& tensor) {
  return tensor.storage().getWeakStorageImpl();
}

absl::Status Backward(const at::Tensor& loss, bool retain_graph) {
  return TorchToStatus("backward", [&] { loss.backward({}, retain_graph); });
}

Chain::Chain(int length) {
  for (int i = 0; i < length; ++i) {
    layers_.push_back(Linear(kDim, kDim));
    FillParameters(*layers_.back(), 3 * i);
  }
}

at::Tensor Chain::Loss(const CheckpointOptions& options,
                       std::vector<WeakStorage>* memory) {
  at::Tensor x = input_.mul(2);
  for (Linear& layer : layers_) {
    if (memory != nullptr) memory->push_back(MemoryOf(x));
    x = CheckpointWith(
        options,
        [layer](const at::Tensor& x) mutable {
          return at::tanh(layer->forward(x));
        },
        x);
  }
  return x.square().mean();
}

std::vector<at::Tensor> Chain::TakeGradients() {
  std::vector<at::Tensor> gradients = {input_.grad()};
  input_.mutable_grad().reset();
  for (Linear& layer : layers_) {
    for (at::Tensor& parameter : layer->parameters()) {
      gradients.push_back(parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  return gradients;
}

std::vector<at::Tensor> Step(Chain& chain, const CheckpointOptions& options) {
  const at::Tensor loss = chain.Loss(options);
  loss.backward();
  std::vector<at::Tensor> results = chain.TakeGradients();
  results.push_back(loss.detach());
  return results;
}

bool Same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined() || !b[i].defined() || !at::equal(a[i], b[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace fsdp::offloaded_regions
