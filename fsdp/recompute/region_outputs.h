// The results of a checkpointed region.
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
#include "base/autograd_node.h"

namespace fsdp::checkpoint_internal {

// The tensors in a region's arguments, which may leave memory meanwhile.
class GivenTensors {
 public:
  using Identity = const c10::TensorImpl*;

  void Add(const at::Tensor& tensor);

  bool Has(const at::Tensor& tensor) const {
    return tensors_.count(tensor.unsafeGetTensorImpl()) > 0;
  }
  // Returns whether a tensor is `base` or a view of it.
  bool HasMemoryOf(const at::Tensor& base) const {
    return bases_.count(base.unsafeGetTensorImpl()) > 0;
  }
  // Returns the tensor from which views of `base` get their gradient.
  at::Tensor SourceOf(const at::Tensor& base) const;

 private:
  std::set<Identity> tensors_;
  // Undefined, except for a base with a view that is a leaf of its own.
  std::map<Identity, at::Tensor> bases_;
};

// Relates the results of a region's forward, which records nothing, to those of
// its recomputation. Tensors that the region made get their gradient from its
// node; tensors that it was given keep theirs.
class RegionOutputs {
 public:
  // Replaces tensors of `outputs`: those that the region made by aliases whose
  // gradient goes to `node`, with one input of it for each memory, and views of
  // tensors that it was given by differentiable views of these. Views of each
  // other stay so, and any may be modified in place.
  void Wrap(const NodePtr& node, const GivenTensors& given,
            const std::vector<at::Tensor*>& outputs);

  // Returns the results of a recomputation to which the gradients of the node's
  // inputs belong, in that order. FailedPrecondition, with `region_name`: the
  // results differ from the forward's.
  absl::StatusOr<std::vector<at::Tensor>> RootsOf(
      const std::vector<at::Tensor>& outputs,
      const std::string& region_name) const;

 private:
  // An output, or the base of which an output is a view.
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
