// Selects the parameters of a module that are flattened, checks them and makes
// them one.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/layout.h"
#include "flat_param/module_walk.h"

namespace fsdp::flat_param {
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
                         "[", absl::StrJoin(entry.tensor.sizes(), ", "), "]",
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
