// The step of backward from the gradients of parameters to that of the flat
// parameter.
#ifndef FLAT_PARAM_FLATTEN_NODE_H_
#define FLAT_PARAM_FLATTEN_NODE_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"

namespace fsdp::flat_param {

// Returns a new 1-D tensor like `like`, in which gradients[i] lies where
// parameter i does. gradients[i] may have any strides, be sparse or undefined;
// the rest is zero. Returns an undefined tensor if no gradient is defined.
// Differentiable.
at::Tensor FlattenGradients(const FlatLayout& layout,
                            const std::vector<at::Tensor>& gradients,
                            const at::TensorOptions& like);

// Points the autograd edges of all tensors of `parameters` to one new node,
// which passes their gradients on to `flat` as one. parameters[i] lies at place
// i of `layout`; `flat` requires grad.
void AttachFlattenNode(std::shared_ptr<const FlatLayout> layout,
                       const at::Tensor& flat,
                       const std::vector<NamedParameter>& parameters);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLATTEN_NODE_H_
