// The step of backward from the gradients of parameters to the gradient of the
// flat parameter.
#ifndef FLAT_PARAM_FLATTEN_NODE_H_
#define FLAT_PARAM_FLATTEN_NODE_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"

namespace fsdp::flat_param {

// gradients[i], of any strides, sparse or undefined, where parameter i lies in
// a new 1-D tensor like `like`; zero where there is none. Undefined when no
// gradient is defined. Differentiable.
at::Tensor FlattenGradients(const FlatLayout& layout,
                            const std::vector<at::Tensor>& gradients,
                            const at::TensorOptions& like);

// Points autograd's edge of every tensor of parameters[i], which lies at place
// i of `layout`, to one new node, which passes the gradients of all of them on
// to `flat` as one. `flat` requires grad.
void AttachFlattenNode(std::shared_ptr<const FlatLayout> layout,
                       const at::Tensor& flat,
                       const std::vector<NamedParameter>& parameters);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLATTEN_NODE_H_
