#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/autograd_node.h"
#include "base/torch_status.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/guarded_storage.h"

namespace fsdp::flat_param {
namespace {

using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

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
         tensor.strides() == c10::IntArrayRef(layout_->parameter(i).strides) &&
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
          c10::str(flat_.sizes()), ": it has to be contiguous, of ",
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
  std::vector<std::pair<int, at::Tensor>> replaced;
  for (int i = 0; i < layout_->num_parameters(); ++i) {
    for (const at::Tensor& tensor : parameters_[i].tensors) {
      if (IsBound(tensor, i)) continue;
      const c10::IntArrayRef sizes = layout_->parameter(i).sizes;
      if (tensor.sizes() != sizes) {
        misfits.push_back(absl::StrCat(parameters_[i].name, " has sizes ",
                                       c10::str(tensor.sizes()), ", not ",
                                       c10::str(sizes)));
        continue;
      }
      // Views of what is written now are copied first.
      const bool is_inside = tensor.has_storage() && tensor.is_alias_of(flat_);
      replaced.emplace_back(i, is_inside ? tensor.clone() : tensor);
    }
  }
  for (const auto& [i, values] : replaced) View(flat_, i).copy_(values);
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
                   " elements, and has sizes ", c10::str(values.sizes())));
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

namespace {

using ::torch::nn::Module;

bool HasDenseMemory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_quantized() &&
         !tensor.is_meta() && tensor.has_storage();
}

absl::Status CheckSelected(const std::string& name, const at::Tensor& tensor) {
  if (!HasDenseMemory(tensor)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name,
        " has no dense memory of its own: only dense tensors can be "
        "flattened"));
  }
  if (flat_param::IsGuarded(tensor.storage())) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter ", name,
                     " belongs to a unit of a sharded model: flatten first, "
                     "then shard"));
  }
  if (!tensor.is_leaf() || tensor.is_inference()) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter ", name, " is ",
                     tensor.is_leaf() ? "an inference tensor" : "no leaf",
                     ": it was computed from another tensor, or is tied to a "
                     "parameter that a wrapper inside has flattened"));
  }
  return absl::OkStatus();
}

// The parameters that are to be flattened, out of all that `places` have.
class Selection {
 public:
  explicit Selection(const FlattenOptions& options) : options_(options) {}

  absl::Status Read(const std::vector<ModulePlace>& places) {
    for (const ModulePlace& place : places) {
      if (!modules_.insert(place.module.get()).second) continue;
      const bool is_wrapper =
          dynamic_cast<const WrapperModule*>(place.module.get()) != nullptr;
      for (const auto& item : RegisteredParameters(*place.module)) {
        if (!item.value().defined()) continue;
        const std::string name = JoinName(place.path, item.key());
        const bool selected =
            !is_wrapper &&
            (!options_.select || options_.select(name, item.value()));
        if (selected) {
          if (place.module->as<torch::nn::ParameterList>() != nullptr ||
              place.module->as<torch::nn::ParameterDict>() != nullptr) {
            return absl::InvalidArgumentError(absl::StrCat(
                "parameter ", name,
                " is in a ParameterList or ParameterDict, which has only what "
                "is registered: leave it out by FlattenOptions::select"));
          }
          FSDP_RETURN_IF_ERROR(CheckSelected(name, item.value()));
        } else if (!HasDenseMemory(item.value())) {
          continue;
        }
        const int number = ties_.Add(name, item.value());
        numbers_[item.value().unsafeGetTensorImpl()] = number;
        if (selected) selected_.try_emplace(number, selected_.size());
      }
    }
    return ties_.CheckOverlaps("flattening");
  }

  // Returns the number of a selected parameter, or -1. Tied parameters are
  // selected at all their places, or at none.
  int NumberOf(const at::Tensor& tensor) const {
    const auto number = numbers_.find(tensor.unsafeGetTensorImpl());
    if (number == numbers_.end()) return -1;
    const auto selected = selected_.find(number->second);
    return selected == selected_.end() ? -1 : selected->second;
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names(selected_.size());
    for (const auto& [number, selected] : selected_) {
      names[selected] = ties_.parameters()[number].name;
    }
    return names;
  }

 private:
  const FlattenOptions& options_;
  TiedParameters ties_;
  std::set<const Module*> modules_;
  std::map<const void*, int> numbers_;
  std::map<int, int> selected_;  // in the order of first selection
};

absl::Status CheckAlike(const std::vector<NamedParameter>& parameters) {
  const NamedParameter& first = parameters.front();
  const at::Tensor& a = first.tensors.front();
  for (const NamedParameter& parameter : parameters) {
    for (const at::Tensor& b : parameter.tensors) {
      if (a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
          a.requires_grad() == b.requires_grad()) {
        continue;
      }
      const auto describe = [](const at::Tensor& tensor) {
        return absl::StrCat(c10::toString(tensor.scalar_type()), " on ",
                            tensor.device().str(),
                            tensor.requires_grad() ? "" : ", frozen");
      };
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", first.name, " is ", describe(a), ", and ",
          parameter.name, " is ", describe(b),
          ": what becomes one flat parameter has one dtype and device, and is "
          "trainable or frozen as a whole. Select parameters that are alike by "
          "FlattenOptions::select"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<FlattenedModule>> FlattenedModule::Create(
    const std::shared_ptr<Module>& module, const FlattenOptions& options) {
  if (c10::InferenceMode::is_enabled()) {
    return absl::FailedPreconditionError(
        "a module cannot be flattened in inference mode, whose tensors have no "
        "versions: leave it first. Flattened modules run in it");
  }
  auto result = absl::WrapUnique(new FlattenedModule());
  FSDP_RETURN_IF_ERROR(result->Collect(module, options));
  c10::ScalarType dtype = c10::kByte;  // of no parameters
  if (!result->parameters_.empty()) {
    FSDP_RETURN_IF_ERROR(CheckAlike(result->parameters_));
    dtype = result->parameters_.front().tensors.front().scalar_type();
  }
  FSDP_ASSIGN_OR_RETURN(FlatLayout layout,
                        LayoutOf(result->parameters_, dtype, /*world_size=*/1,
                                 /*alignment_bytes=*/1));
  result->layout_ = std::make_shared<const FlatLayout>(std::move(layout));
  if (options.flat_data.defined()) {
    FSDP_RETURN_IF_ERROR(result->CheckValues(options.flat_data));
  }
  if (result->parameters_.empty()) return result;
  if (!options.allow_outside_references) {
    FSDP_RETURN_IF_ERROR(result->CheckOutsideReferences());
  }
  FSDP_RETURN_IF_ERROR(TorchToStatus("flattening a module", [&] {
    c10::NoGradGuard no_grad;
    const at::Tensor& first = result->parameters_.front().tensors.front();
    at::Tensor flat =
        options.flat_data.defined()
            ? at::empty({result->layout_->numel()},
                        first.options().requires_grad(false))
                  .copy_(options.flat_data)
            : FlatParameter::Flatten(result->parameters_, *result->layout_);
    result->Adopt(std::move(flat), first.requires_grad());
  }));
  return result;
}

absl::StatusOr<std::unique_ptr<FlattenedModule>> FlattenedModule::CloneFor(
    const std::shared_ptr<Module>& copy,
    const std::optional<c10::Device>& device) const {
  auto result = absl::WrapUnique(new FlattenedModule());
  result->layout_ = layout_;
  for (const NamedParameter& parameter : parameters_) {
    result->parameters_.push_back({parameter.name, {}});
  }
  std::map<std::string, std::shared_ptr<Module>> modules;
  for (ModulePlace& place : PlacesOf(copy)) {
    modules[place.path] = std::move(place.module);
  }
  for (const FlattenedPlace& original : places_) {
    const std::shared_ptr<Module>& module = modules[original.place.path];
    for (const Entry& entry : original.entries) {
      if (entry.parameter == -1) continue;
      const at::Tensor* tensor =
          module == nullptr ? nullptr
                            : RegisteredParameters(*module).find(entry.key);
      if (tensor == nullptr || !tensor->defined() ||
          tensor->sizes() != entry.tensor.sizes()) {
        return absl::FailedPreconditionError(
            absl::StrCat("the clone of a flattened module has no parameter ",
                         JoinName(original.place.path, entry.key), " of sizes ",
                         c10::str(entry.tensor.sizes()),
                         ": reset() has to register what the constructor has"));
      }
    }
    result->AddPlace({original.place.path, module},
                     [&original](const std::string& key) {
                       for (const Entry& entry : original.entries) {
                         if (entry.key == key) return entry.parameter;
                       }
                       return -1;
                     });
  }
  if (flat_.defined()) {
    c10::NoGradGuard no_grad;
    result->Adopt(flat_.detach().to(device.value_or(flat_.device())).clone(),
                  flat_.requires_grad());
  }
  return result;
}

absl::Status FlattenedModule::Collect(const std::shared_ptr<Module>& module,
                                      const FlattenOptions& options) {
  std::vector<ModulePlace> places = PlacesOf(module);
  Selection selection(options);
  FSDP_RETURN_IF_ERROR(selection.Read(places));
  for (std::string& name : selection.Names()) {
    parameters_.push_back({std::move(name), {}});
  }
  std::set<const Module*> seen;
  for (ModulePlace& place : places) {
    if (!seen.insert(place.module.get()).second) continue;
    auto& registered = RegisteredParameters(*place.module);
    const auto number_of = [&](const std::string& key) {
      const at::Tensor& tensor = registered[key];
      return tensor.defined() ? selection.NumberOf(tensor) : -1;
    };
    bool any = false;
    for (const auto& item : registered) any |= number_of(item.key()) != -1;
    if (any) AddPlace(std::move(place), number_of);
  }
  return absl::OkStatus();
}

void FlattenedModule::AddPlace(
    ModulePlace place,
    absl::FunctionRef<int(const std::string& key)> parameter_of) {
  FlattenedPlace& flattened = places_.emplace_back();
  for (const auto& item : RegisteredParameters(*place.module)) {
    const int parameter = parameter_of(item.key());
    flattened.entries.push_back(
        {item.key(), parameter, parameter == -1 ? at::Tensor() : item.value()});
    if (parameter == -1) continue;
    std::vector<at::Tensor>& tensors = parameters_[parameter].tensors;
    if (std::none_of(tensors.begin(), tensors.end(),
                     [&item](const at::Tensor& tensor) {
                       return tensor.is_same(item.value());
                     })) {
      tensors.push_back(item.value());
    }
  }
  flattened.place = std::move(place);
}

void FlattenedModule::Adopt(at::Tensor flat, bool requires_grad) {
  flat_ = std::move(flat);
  flat_.set_requires_grad(requires_grad);
  TakeGradients();
  Unregister();
  Bind(flat_);
  Attach();
}

// An optimizer refers to every trainable parameter. If nothing besides the
// modules and this object refers to one of them, there is no optimizer.
absl::Status FlattenedModule::CheckOutsideReferences() const {
  // A module holds a parameter in its dictionary and in a member, this object
  // in an Entry.
  constexpr int kReferencesPerUse = 3;
  std::map<const void*, int> explained;
  for (const FlattenedPlace& flattened : places_) {
    for (const Entry& entry : flattened.entries) {
      explained[entry.tensor.unsafeGetTensorImpl()] += kReferencesPerUse;
    }
  }
  bool any = false;
  for (const NamedParameter& parameter : parameters_) {
    for (const at::Tensor& tensor : parameter.tensors) {
      if (!tensor.requires_grad()) continue;
      any = true;
      // One more reference is that of parameters_.
      if (static_cast<int>(tensor.use_count()) <=
          explained[tensor.unsafeGetTensorImpl()] + 1) {
        return absl::OkStatus();
      }
    }
  }
  if (!any) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "something besides the module refers to every trainable parameter. If it "
      "is an optimizer, it would go on without training anything: make it "
      "after flattening. If it is a list or a loss of yours, drop it first or "
      "set FlattenOptions::allow_outside_references");
}

}  // namespace fsdp::flat_param
