#include "fsdp/recompute/region_outputs.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace fsdp::checkpoint_internal {
namespace {

using ::torch::autograd::Edge;
using ::torch::autograd::Node;

constexpr char kDoTheSame[] =
    ": the function has to do the same in forward and in backward, so make "
    "what it depends on an argument";

// Returns what a recomputation is compared by.
std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return absl::StrCat(c10::toString(tensor.scalar_type()), " [",
                      absl::StrJoin(tensor.sizes(), ", "), "] on ",
                      tensor.device().str());
}

bool CanHaveGradient(const at::Tensor& tensor) {
  return tensor.defined() &&
         torch::autograd::isDifferentiableType(tensor.scalar_type());
}

at::Tensor BaseOf(const at::Tensor& tensor) {
  return tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
}

// Makes `view` again as a view of `base`, which has its own base's memory.
at::Tensor ViewAgain(const at::Tensor& view, const at::Tensor& base) {
  const auto& info =
      torch::autograd::impl::get_view_autograd_meta(view)->get_backward_view();
  if (info.has_view_fn()) return info.view_fn()(base);
  return base.as_strided(view.sizes(), view.strides(), view.storage_offset());
}

at::Tensor AliasFrom(const NodePtr& node, const at::Tensor& tensor) {
  at::Tensor alias = tensor.detach();
  const uint32_t k = node->add_input_metadata(alias);
  torch::autograd::impl::set_gradient_edge(alias, Edge(node, k));
  return alias;
}

}  // namespace

void GivenTensors::Add(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  tensors_.insert(tensor.unsafeGetTensorImpl());
  const at::Tensor base = BaseOf(tensor);
  at::Tensor& source = bases_[base.unsafeGetTensorImpl()];
  if (tensor.requires_grad() && !base.requires_grad()) source = tensor;
}

at::Tensor GivenTensors::SourceOf(const at::Tensor& base) const {
  const auto found = bases_.find(base.unsafeGetTensorImpl());
  const bool is_leaf = found != bases_.end() && found->second.defined();
  return is_leaf ? found->second : base;
}

void RegionOutputs::Wrap(const NodePtr& node, const GivenTensors& given,
                         const std::vector<at::Tensor*>& outputs) {
  const c10::AutoGradMode grad(true);
  std::map<GivenTensors::Identity, std::set<GivenTensors::Identity>>
      tensors_of_base;
  std::map<GivenTensors::Identity, size_t> first_output;
  for (size_t i = 0; i < outputs.size(); ++i) {
    descriptions_.push_back(Describe(*outputs[i]));
    if (!CanHaveGradient(*outputs[i])) continue;
    const GivenTensors::Identity tensor = outputs[i]->unsafeGetTensorImpl();
    tensors_of_base[BaseOf(*outputs[i]).unsafeGetTensorImpl()].insert(tensor);
    first_output.try_emplace(tensor, i);
  }
  std::map<GivenTensors::Identity, at::Tensor> replacements;
  // Keeps the tensors alive whose addresses are the keys.
  std::vector<at::Tensor> replaced;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!CanHaveGradient(*outputs[i])) continue;
    const at::Tensor output = *outputs[i];
    replaced.push_back(output);
    const at::Tensor base = BaseOf(output);
    at::Tensor& replacement = replacements[output.unsafeGetTensorImpl()];
    // The forward records nothing that could require grad.
    const bool is_of_before = base.requires_grad() || given.HasMemoryOf(base);
    if (!replacement.defined() && is_of_before) {
      replacement = output.is_view() && !given.Has(output)
                        ? ViewAgain(output, given.SourceOf(base))
                        : output;
    } else if (!replacement.defined()) {
      const bool is_related =
          CanHaveGradient(base) &&
          tensors_of_base[base.unsafeGetTensorImpl()].size() > 1;
      const at::Tensor& root = is_related ? base : output;
      at::Tensor& alias = replacements[root.unsafeGetTensorImpl()];
      if (!alias.defined()) {
        const auto found = first_output.find(root.unsafeGetTensorImpl());
        const bool is_base = found == first_output.end();
        roots_.push_back(
            {is_base ? i : found->second, is_base, Describe(root)});
        alias = AliasFrom(node, root);
      }
      if (!root.is_same(output)) {
        replacements[output.unsafeGetTensorImpl()] = ViewAgain(output, alias);
      }
    }
    *outputs[i] = replacements[output.unsafeGetTensorImpl()];
  }
}

absl::StatusOr<std::vector<at::Tensor>> RegionOutputs::RootsOf(
    const std::vector<at::Tensor>& outputs,
    const std::string& region_name) const {
  if (outputs.size() != descriptions_.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("recomputing ", region_name, " gave ", outputs.size(),
                     " tensors instead of ", descriptions_.size(), kDoTheSame));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    const std::string description = Describe(outputs[i]);
    if (description == descriptions_[i]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "recomputing ", region_name, " gave ", description, " as tensor ", i,
        " of its result instead of ", descriptions_[i], kDoTheSame));
  }
  std::vector<at::Tensor> tensors;
  for (const Root& root : roots_) {
    const at::Tensor& output = outputs[root.output];
    tensors.push_back(root.is_base ? BaseOf(output) : output);
    const std::string description = Describe(tensors.back());
    if (description == root.description) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "recomputing ", region_name, " gave a view of ", description,
        " as tensor ", root.output, " of its result instead of one of ",
        root.description, kDoTheSame));
  }
  return tensors;
}

}  // namespace fsdp::checkpoint_internal
