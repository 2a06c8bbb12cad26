#include "flat_param/flatten_node.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::flat_param {
namespace {

using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

class FlattenNode final : public Node {
 public:
  FlattenNode(std::shared_ptr<const FlatLayout> layout,
              const at::TensorOptions& like)
      : layout_(std::move(layout)), like_(like) {}

  std::string name() const override { return "fsdp::Flatten"; }

  variable_list apply(variable_list&& gradients) override {
    return {FlattenGradients(*layout_, gradients, like_)};
  }

 private:
  const std::shared_ptr<const FlatLayout> layout_;
  const at::TensorOptions like_;
};

}  // namespace

at::Tensor FlattenGradients(const FlatLayout& layout,
                            const std::vector<at::Tensor>& gradients,
                            const at::TensorOptions& like) {
  if (std::none_of(gradients.begin(), gradients.end(),
                   [](const at::Tensor& g) { return g.defined(); })) {
    return at::Tensor();
  }
  at::Tensor flat = at::empty({layout.padded_numel()}, like);
  int64_t end = 0;  // of what is written
  const auto zero_up_to = [&](int64_t begin) {
    if (begin > end) flat.narrow(0, end, begin - end).zero_();
  };
  for (int i = 0; i < layout.num_parameters(); ++i) {
    if (!gradients[i].defined()) continue;
    const Slice slice = layout.InFlat(i);
    zero_up_to(slice.begin);
    const ParameterSpec& spec = layout.parameter(i);
    flat.as_strided(spec.sizes, spec.strides, slice.begin)
        .copy_(gradients[i].is_sparse() ? gradients[i].to_dense()
                                        : gradients[i]);
    end = slice.end;
  }
  zero_up_to(flat.numel());
  return flat;
}

void AttachFlattenNode(std::shared_ptr<const FlatLayout> layout,
                       const at::Tensor& flat,
                       const std::vector<NamedParameter>& parameters) {
  auto node = std::make_shared<FlattenNode>(
      std::move(layout),
      at::TensorOptions().dtype(flat.dtype()).device(flat.device()));
  node->add_next_edge(torch::autograd::impl::gradient_edge(flat));
  for (const NamedParameter& parameter : parameters) {
    const uint32_t slot = node->add_input_metadata(parameter.tensors.front());
    for (const at::Tensor& tensor : parameter.tensors) {
      torch::autograd::impl::set_gradient_edge(
          tensor, torch::autograd::Edge(node, slot));
    }
  }
}

}  // namespace fsdp::flat_param
