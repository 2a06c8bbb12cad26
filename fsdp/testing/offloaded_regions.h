// Checkpointed regions whose arguments are offloaded, and their results.
#ifndef FSDP_TESTING_OFFLOADED_REGIONS_H_
#define FSDP_TESTING_OFFLOADED_REGIONS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fsdp/options/options.h"
#include "fsdp/recompute/activation_offload.h"
#include "fsdp/testing/toy_model.h"
#include "offload/param_store.h"

namespace fsdp::offloaded_regions {

using ::fsdp::offload::ParamStore;
using ::fsdp::testing::Rows;
using ::torch::nn::Linear;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline constexpr int64_t kRows = 3;
inline constexpr int64_t kDim = 5;

// Return stores with room for `regions` arguments of up to a page.
std::unique_ptr<ParamStore> Host(int64_t regions = 64);
std::unique_ptr<ParamStore> File();

// In the result, any tensor is large enough to be moved.
std::shared_ptr<ActivationOffload> Offload(
    std::unique_ptr<ParamStore> store,
    absl::Duration timeout = absl::Seconds(60));

CheckpointOptions With(std::shared_ptr<ActivationOffload> offload);

WeakStorage MemoryOf(const at::Tensor& tensor);

absl::Status Backward(const at::Tensor& loss, bool retain_graph = false);

// Layers in regions of their own, one after another.
class Chain {
 public:
  explicit Chain(int length);

  // Returns the loss of a forward. Sets `memory` to the memory of the regions'
  // arguments.
  at::Tensor Loss(const CheckpointOptions& options,
                  std::vector<WeakStorage>* memory = nullptr);

  // Returns the gradients of the parameters and the input, which then have
  // none.
  std::vector<at::Tensor> TakeGradients();

 private:
  at::Tensor input_ = Rows(1, kRows, kDim).requires_grad_();
  std::vector<Linear> layers_;
};

// Returns the loss and all gradients of a step.
std::vector<at::Tensor> Step(Chain& chain, const CheckpointOptions& options);

bool Same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

}  // namespace fsdp::offloaded_regions

#endif  // FSDP_TESTING_OFFLOADED_REGIONS_H_
