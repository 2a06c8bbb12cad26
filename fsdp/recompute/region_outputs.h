// What a checkpointed region returns.
#ifndef FSDP_RECOMPUTE_REGION_OUTPUTS_H_
#define FSDP_RECOMPUTE_REGION_OUTPUTS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace fsdp::checkpoint_internal {

// The tensors in a region's arguments, which may leave memory meanwhile.
class GivenTensors {
 public:
  using Identity = const c10::TensorImpl*;

  void Add(const at::Tensor& tensor);

  bool Has(const at::Tensor& tensor) const {
    return tensors_.count(tensor.unsafeGetTensorImpl()) > 0;
  }
  // Whether one is `base` or a view of it.
  bool HasMemoryOf(const at::Tensor& base) const {
    return bases_.count(base.unsafeGetTensorImpl()) > 0;
  }
  // What views of `base` get their gradient from.
  at::Tensor SourceOf(const at::Tensor& base) const;

 private:
  std::set<Identity> tensors_;
  // Undefined, but for a view that is a leaf of its own.
  std::map<Identity, at::Tensor> bases_;
};

// Relates the results of a region's forward, which records nothing, to those of
// its recomputation. What the region has made gets its gradient from the
// region's node; what it was given keeps the gradient that it has.
class RegionOutputs {
 public:
  // Replaces tensors of `outputs`: those that the region has made by aliases
  // whose gradient goes to `node`, one input of it for each memory; views of
  // what it was given by differentiable views of the same. Views of each other
  // stay that, so any may be modified in place.
  void Wrap(const std::shared_ptr<torch::autograd::Node>& node,
            const GivenTensors& given, const std::vector<at::Tensor*>& outputs);

  // Of the results of a recomputation, those that the gradients of the node's
  // inputs belong to, in that order. FailedPrecondition where results are
  // others than those of the forward; `region_name` is for the text.
  absl::StatusOr<std::vector<at::Tensor>> RootsOf(
      const std::vector<at::Tensor>& outputs,
      const std::string& region_name) const;

 private:
  // An output, or what it is a view of.
  struct Root {
    size_t output;
    bool is_base;
    std::string description;
  };

  std::vector<std::string> descriptions_;  // of the outputs
  std::vector<Root> roots_;
};

}  // namespace fsdp::checkpoint_internal

#endif  // FSDP_RECOMPUTE_REGION_OUTPUTS_H_
