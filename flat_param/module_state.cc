#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/module_walk.h"

namespace fsdp::flat_param {
namespace {

using ::torch::nn::Module;

// Names and tensors of a tree of modules, which has the form asked for as long
// as this lives.
class State {
 public:
  State(const std::shared_ptr<Module>& root, StateForm form) {
    if (form == StateForm::kOriginal) {
      for (const ModulePlace& place : PlacesOf(root)) Unflatten(*place.module);
    }
    Read("", *root);
  }

  const NamedTensors& tensors() const { return tensors_; }

 private:
  void Unflatten(Module& module) {
    auto* wrapper = dynamic_cast<FlattenParamsWrapperBase*>(&module);
    if (wrapper == nullptr) return;
    // This is a prvalue, since the scope can be neither copied nor moved.
    scopes_.emplace_back(new UnflattenedParams(wrapper->UnflattenAsParams()));
  }

  void Read(const std::string& path, const Module& module) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      Add(JoinName(path, item.key()), item.value());
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      Add(JoinName(path, item.key()), item.value());
    }
    if (const auto* wrapper = dynamic_cast<const WrapperModule*>(&module)) {
      Read(path, *wrapper->wrapped_module());
      return;
    }
    for (const auto& child : module.named_children()) {
      if (!child.value()->is_serializable()) continue;
      Read(JoinName(path, child.key()), *child.value());
    }
  }

  void Add(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    // Wrappers directly around one another have one path.
    std::string unique = name;
    for (int i = 1; tensors_.contains(unique); ++i) {
      unique = absl::StrCat(name, "_", i);
    }
    tensors_.insert(unique, tensor.detach());
  }

  std::vector<std::unique_ptr<UnflattenedParams>> scopes_;
  NamedTensors tensors_;
};

absl::Status Differences(const NamedTensors& expected,
                         const NamedTensors& actual, bool strict) {
  std::vector<std::string> found;
  const auto sizes = [](const at::Tensor& tensor) {
    return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
  };
  for (const auto& item : expected) {
    const at::Tensor* tensor = actual.find(item.key());
    if (tensor == nullptr) {
      if (strict) found.push_back(absl::StrCat(item.key(), " is missing"));
    } else if (!tensor->defined()) {
      found.push_back(absl::StrCat(item.key(), " is undefined"));
    } else if (tensor->sizes() != item.value().sizes()) {
      found.push_back(absl::StrCat(item.key(), " has sizes ", sizes(*tensor),
                                   ", not ", sizes(item.value())));
    }
  }
  for (const auto& item : actual) {
    if (strict && !expected.contains(item.key())) {
      found.push_back(absl::StrCat(item.key(), " is unexpected"));
    }
  }
  if (found.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "loading tensors into a module that they do not fit: ",
      absl::StrJoin(found, "; "),
      strict ? ". Names that are missing or unexpected are ignored with "
               "strict = false"
             : ""));
}

}  // namespace

NamedTensors StateDict(const std::shared_ptr<Module>& module, StateForm form) {
  return State(module, form).tensors();
}

absl::Status LoadStateDict(const std::shared_ptr<Module>& module,
                           const NamedTensors& tensors, bool strict,
                           StateForm form) {
  absl::Status differences;
  FSDP_RETURN_IF_ERROR(TorchToStatus("loading tensors into a module", [&] {
    const State state(module, form);
    differences = Differences(state.tensors(), tensors, strict);
    if (!differences.ok()) return;
    c10::NoGradGuard no_grad;
    for (const auto& item : state.tensors()) {
      const at::Tensor* source = tensors.find(item.key());
      if (source != nullptr) item.value().copy_(*source);
    }
  }));
  return differences;
}

}  // namespace fsdp::flat_param
