#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
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

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/autograd_node.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/layout.h"
#include "flat_param/module_walk.h"

namespace fsdp::flat_param {
namespace {

using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

std::string Sizes(c10::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// Returns a new 1-D tensor like `like`, in which gradients[i] lies where
// parameter i does. gradients[i] may have any strides, be sparse or undefined;
// the rest is zero. Returns an undefined tensor if no gradient is defined.
// Differentiable.
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

// The step of backward from the gradients of parameters to that of the flat
// parameter.
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

FlattenedModule::~FlattenedModule() {
  // Only a lack of memory can make this fail, and what is left is a module
  // whose parameters are hidden.
  TorchToStatus("unflattening", [this] {
    Unflatten(at::Tensor());
  }).IgnoreError();
}

void FlattenedModule::Register() {
  for (const FlattenedPlace& flattened : places_) {
    auto& registered = RegisteredParameters(*flattened.place.module);
    const auto others = registered;
    registered.clear();
    for (const Entry& entry : flattened.entries) {
      if (entry.parameter != -1) {
        registered.insert(entry.key, entry.tensor);
      } else if (others.contains(entry.key)) {
        registered.insert(entry.key, others[entry.key]);
      }
    }
    for (const auto& item : others) {  // registered since
      if (!registered.contains(item.key())) {
        registered.insert(item.key(), item.value());
      }
    }
  }
}

void FlattenedModule::Unregister() {
  for (const FlattenedPlace& flattened : places_) {
    auto& registered = RegisteredParameters(*flattened.place.module);
    for (const Entry& entry : flattened.entries) {
      if (entry.parameter != -1 && registered.contains(entry.key)) {
        registered.erase(entry.key);
      }
    }
  }
}

at::Tensor FlattenedModule::View(const at::Tensor& memory, int i) const {
  const ParameterSpec& spec = layout_->parameter(i);
  return memory.detach().as_strided(
      spec.sizes, spec.strides,
      memory.storage_offset() + layout_->InFlat(i).begin);
}

void FlattenedModule::Bind(const at::Tensor& memory) {
  bound_ = memory.detach();
  for (int i = 0; i < layout_->num_parameters(); ++i) {
    const at::Tensor view = View(memory, i);
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      tensor.set_data(view);
      // Shares the version counter, as views do: autograd notices when an
      // optimizer writes to what a graph has saved.
      torch::autograd::impl::set_version_counter(
          tensor, torch::autograd::impl::version_counter(memory));
    }
  }
}

bool FlattenedModule::IsBound(const at::Tensor& tensor, int i) const {
  return tensor.defined() && tensor.has_storage() &&
         tensor.storage().is_alias_of(bound_.storage()) &&
         tensor.storage_offset() ==
             bound_.storage_offset() + layout_->InFlat(i).begin &&
         tensor.sizes() == c10::IntArrayRef(layout_->parameter(i).sizes) &&
         tensor.dtype() == bound_.dtype();
}

void FlattenedModule::Attach() {
  for (const NamedParameter& parameter : parameters_) {
    for (const at::Tensor& tensor : parameter.tensors) {
      torch::autograd::impl::set_gradient_edge(tensor, {});
      tensor.set_requires_grad(false);
    }
  }
  if (!flat_.requires_grad()) return;
  auto node = MakeNode<FlattenNode>(
      layout_, at::TensorOptions().dtype(flat_.dtype()).device(flat_.device()));
  node->add_next_edge(torch::autograd::impl::gradient_edge(flat_));
  for (const NamedParameter& parameter : parameters_) {
    const uint32_t slot = node->add_input_metadata(parameter.tensors.front());
    for (const at::Tensor& tensor : parameter.tensors) {
      torch::autograd::impl::set_gradient_edge(
          tensor, torch::autograd::Edge(node, slot));
    }
  }
}

absl::Status FlattenedModule::PreForward() {
  if (unflattened_ || !flat_.defined()) return absl::OkStatus();
  if (!flat_.storage().is_alias_of(bound_.storage()) ||
      flat_.storage_offset() != bound_.storage_offset() ||
      flat_.dtype() != bound_.dtype()) {
    if (flat_.dim() != 1 || flat_.numel() != layout_->numel() ||
        !flat_.is_contiguous()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "forward of a flattened module whose flat parameter has become one "
          "of sizes ",
          Sizes(flat_.sizes()), ": it has to be contiguous, of ",
          layout_->numel(), " elements"));
    }
    Bind(flat_);
  }
  for (int i = 0; i < layout_->num_parameters(); ++i) {
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      if (IsBound(tensor, i)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "forward of a flattened module whose parameter ", parameters_[i].name,
          " no longer looks into the flat parameter, because its data was "
          "replaced: do that while unflattened, or write into it in place"));
    }
  }
  if (c10::GradMode::is_enabled()) Attach();
  return absl::OkStatus();
}

void FlattenedModule::Unflatten(const at::Tensor& memory) {
  if (unflattened_ || !flat_.defined()) return;
  c10::NoGradGuard no_grad;
  over_other_memory_ = memory.defined();
  const bool requires_grad = flat_.requires_grad();
  if (over_other_memory_ || !flat_.storage().is_alias_of(bound_.storage())) {
    Bind(over_other_memory_ ? memory : flat_);
  }
  for (const NamedParameter& parameter : parameters_) {
    for (const at::Tensor& tensor : parameter.tensors) {
      torch::autograd::impl::set_gradient_edge(tensor, {});
      tensor.set_requires_grad(requires_grad);
    }
  }
  if (!over_other_memory_ && flat_.grad().defined()) {
    flat_.mutable_grad() = flat_.grad().contiguous();
    for (int i = 0; i < layout_->num_parameters(); ++i) {
      parameters_[i].tensors.front().mutable_grad() = View(flat_.grad(), i);
    }
  }
  Register();
  unflattened_ = true;
}

absl::Status FlattenedModule::Flatten() {
  if (!unflattened_) return absl::OkStatus();
  c10::NoGradGuard no_grad;
  unflattened_ = false;
  Unregister();
  absl::Status status;
  if (!over_other_memory_) {
    status.Update(TorchToStatus("flattening a module", [&] {
      status.Update(TakeRequiresGrad());
      status.Update(TakeValues());
      TakeGradients();
    }));
  }
  for (const NamedParameter& parameter : parameters_) {
    for (const at::Tensor& tensor : parameter.tensors) {
      tensor.mutable_grad().reset();
    }
  }
  Bind(flat_);
  Attach();
  return status;
}

void FlattenedModule::TakeGradients() {
  std::vector<at::Tensor> gradients;
  bool unchanged = flat_.grad().defined();
  for (int i = 0; i < layout_->num_parameters(); ++i) {
    at::Tensor& sum = gradients.emplace_back();
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      const at::Tensor gradient = tensor.grad();
      tensor.mutable_grad().reset();
      if (!gradient.defined()) continue;
      sum = sum.defined() ? sum + gradient : gradient;
    }
    unchanged = unchanged && sum.defined() && sum.has_storage() &&
                sum.storage().is_alias_of(flat_.grad().storage());
  }
  if (unchanged) return;
  flat_.mutable_grad() = FlattenGradients(
      *layout_, gradients,
      at::TensorOptions().dtype(flat_.dtype()).device(flat_.device()));
}

absl::Status FlattenedModule::TakeValues() {
  std::vector<std::string> misfits;
  for (int i = 0; i < layout_->num_parameters(); ++i) {
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      if (IsBound(tensor, i)) continue;
      if (tensor.sizes() != c10::IntArrayRef(layout_->parameter(i).sizes)) {
        misfits.push_back(absl::StrCat(parameters_[i].name, " has sizes ",
                                       Sizes(tensor.sizes()), ", not ",
                                       Sizes(layout_->parameter(i).sizes)));
        continue;
      }
      View(flat_, i).copy_(tensor);
    }
  }
  if (misfits.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "parameters of a flattened module were given data of other sizes: ",
      absl::StrJoin(misfits, "; "), ". They keep their old values"));
}

absl::Status FlattenedModule::TakeRequiresGrad() {
  const bool requires_grad = parameters_[0].tensors[0].requires_grad();
  for (const NamedParameter& parameter : parameters_) {
    for (const at::Tensor& tensor : parameter.tensors) {
      if (tensor.requires_grad() == requires_grad) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "parameters of a flattened module were frozen in part: ",
          parameter.name, " is ", requires_grad ? "frozen, " : "trainable, ",
          parameters_[0].name,
          " is not. A flat parameter is frozen as a "
          "whole, and stays as it was"));
    }
  }
  flat_.set_requires_grad(requires_grad);
  return absl::OkStatus();
}

absl::Status FlattenedModule::Convert(
    absl::FunctionRef<at::Tensor(const at::Tensor&)> convert) {
  if (!flat_.defined()) return absl::OkStatus();
  c10::NoGradGuard no_grad;
  absl::Status status;
  if (unflattened_ && !over_other_memory_) status = TakeValues();
  flat_.set_data(convert(flat_));
  if (!over_other_memory_) Bind(flat_);
  return status;
}

absl::Status FlattenedModule::CheckValues(const at::Tensor& values) const {
  if (values.dim() == 1 && values.numel() == layout_->numel()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("flat data for ", layout_->num_parameters(),
                   " parameters has to be 1-D with ", layout_->numel(),
                   " elements, and has sizes ", Sizes(values.sizes())));
}

absl::Status FlattenedModule::CheckMemory(const at::Tensor& memory) const {
  FSDP_RETURN_IF_ERROR(CheckValues(memory));
  if (memory.is_contiguous() && memory.dtype() == flat_.dtype() &&
      memory.device() == flat_.device()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "flat data for parameters to look into has to be contiguous, ",
      c10::toString(flat_.scalar_type()), " on ", flat_.device().str(),
      ", and is ", memory.is_contiguous() ? "" : "strided, ",
      c10::toString(memory.scalar_type()), " on ", memory.device().str()));
}

absl::Status FlattenedModule::SetValues(const at::Tensor& values) {
  FSDP_RETURN_IF_ERROR(CheckValues(values));
  if (!flat_.defined()) return absl::OkStatus();
  return TorchToStatus("copying flat data", [&] {
    c10::NoGradGuard no_grad;
    flat_.copy_(values);
  });
}

}  // namespace fsdp::flat_param
