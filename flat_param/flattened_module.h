// The parameters of a module as one trainable 1-D tensor, and the way back.
// What FlattenParamsWrapper is made of, without the C++ type of the module.
#ifndef FLAT_PARAM_FLATTENED_MODULE_H_
#define FLAT_PARAM_FLATTENED_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "flat_param/module_walk.h"

namespace fsdp::flat_param {

struct FlattenOptions {
  // Which parameters, by their names; without it all that no wrapper inside the
  // module has flattened.
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      select;

  // Values for the flat parameter in place of the parameters' own, for example
  // those of another wrapper's flat_param(). Copied.
  at::Tensor flat_data;

  // Flattening a module whose every parameter something else refers to is
  // refused: that is usually an optimizer, which would go on without training
  // anything.
  bool allow_outside_references = false;
};

// While flattened, the parameters keep their tensor objects, which are shared
// by the module's dictionary and its members: each looks into the flat
// parameter's memory and points autograd to a node that puts the gradients of
// all together, into the gradient of the flat parameter. They are taken out of
// the modules' dictionaries.
//
// Between Unflatten() and Flatten() they are registered leaves with gradients
// of their own. Not thread-safe.
class FlattenedModule {
 public:
  // InvalidArgument, naming parameters: two dtypes or devices, frozen ones
  // among trainable ones, no dense memory, an overlap with another; flat_data
  // that does not fit. FailedPrecondition: parameters of a sharded unit, or
  // that an optimizer seems to hold; inference mode.
  static absl::StatusOr<std::unique_ptr<FlattenedModule>> Create(
      const std::shared_ptr<torch::nn::Module>& module,
      const FlattenOptions& options);
  // The same parameters of `copy`, a clone of the module, over a copy of the
  // flat parameter, on `device` if given. FailedPrecondition when `copy` lacks
  // one.
  absl::StatusOr<std::unique_ptr<FlattenedModule>> CloneFor(
      const std::shared_ptr<torch::nn::Module>& copy,
      const std::optional<c10::Device>& device) const;

  FlattenedModule(const FlattenedModule&) = delete;
  FlattenedModule& operator=(const FlattenedModule&) = delete;
  // Leaves the module with its parameters registered, over the flat memory.
  ~FlattenedModule();

  // 1-D leaf, undefined when there are no parameters.
  const at::Tensor& flat() const { return flat_; }
  // One entry per distinct parameter, without padding.
  const FlatLayout& layout() const { return *layout_; }
  bool unflattened() const { return unflattened_; }

  // Before every forward: follows a flat parameter that was moved or frozen,
  // and gives this forward a node of its own. Nothing while unflattened.
  // FailedPrecondition: a parameter, or the flat one, looks elsewhere.
  absl::Status PreForward();

  // Registers the parameters, over `memory` if defined, which CheckMemory()
  // has accepted.
  void Unflatten(const at::Tensor& memory);
  // InvalidArgument: not contiguous, or of another size, dtype or device than
  // the flat parameter.
  absl::Status CheckMemory(const at::Tensor& memory) const;
  // Takes values and gradients back into the flat parameter, unless Unflatten()
  // was given memory. On an error a value that does not fit is dropped.
  absl::Status Flatten();

  // Replaces the flat parameter's data by convert(data), another device or
  // dtype of it. Errors as of Flatten().
  absl::Status Convert(
      absl::FunctionRef<at::Tensor(const at::Tensor&)> convert);
  // Copies `values`. InvalidArgument when its shape differs.
  absl::Status SetValues(const at::Tensor& values);

 private:
  // What a module has registered under a key; unregistering forgets the order.
  struct Entry {
    std::string key;
    int parameter;      // -1: not flattened
    at::Tensor tensor;  // undefined where not flattened
  };
  struct FlattenedPlace {
    ModulePlace place;
    std::vector<Entry> entries;
  };

  FlattenedModule() = default;

  absl::Status Collect(const std::shared_ptr<torch::nn::Module>& module,
                       const FlattenOptions& options);
  absl::Status MakeLayout();
  absl::Status CheckOutsideReferences() const;
  absl::Status CheckValues(const at::Tensor& values) const;
  void AddPlace(ModulePlace place,
                absl::FunctionRef<int(const std::string& key)> parameter_of);
  // Takes `flat` as the flat parameter's data and flattens.
  void Adopt(at::Tensor flat, bool requires_grad);
  void Register();
  void Unregister();
  at::Tensor View(const at::Tensor& memory, int i) const;
  void Bind(const at::Tensor& memory);
  bool IsBound(const at::Tensor& tensor, int i) const;
  void Attach();
  void HandOutGradients();
  void TakeGradients();
  absl::Status TakeValues();
  absl::Status TakeRequiresGrad();

  std::vector<FlattenedPlace> places_;
  std::vector<NamedParameter> parameters_;
  std::shared_ptr<const FlatLayout> layout_;
  at::Tensor flat_;
  // What the parameters look into: flat_'s data, or the memory that
  // Unflatten() was given.
  at::Tensor bound_;
  bool unflattened_ = false;
  bool over_other_memory_ = false;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLATTENED_MODULE_H_
