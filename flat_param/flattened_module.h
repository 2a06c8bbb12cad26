// The parameters of a module as one trainable 1-D tensor, and the way back.
// This is FlattenParamsWrapper without the C++ type of the module.
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
  // Selects parameters by name; without it, all that no wrapper inside the
  // module has flattened.
  std::function<bool(const std::string& name, const at::Tensor& parameter)>
      select;

  // Values for the flat parameter instead of the parameters' own, such as
  // another wrapper's flat_param(). They are copied.
  at::Tensor flat_data;

  // Without this, a module is refused if something else refers to every
  // parameter: usually an optimizer, which would then train nothing.
  bool allow_outside_references = false;
};

// While flattened, the parameters keep their tensor objects, which the module's
// members share, and leave its dictionaries. Each looks into the flat
// parameter's memory, and its autograd edge leads to a node that puts all
// gradients together into that of the flat parameter.
//
// Between Unflatten() and Flatten() they are registered leaves with gradients
// of their own. Not thread-safe.
class FlattenedModule {
 public:
  // InvalidArgument names parameters: two dtypes or devices, frozen ones among
  // trainable ones, one that is not dense, or an overlap; or flat_data does not
  // fit. FailedPrecondition: a sharded unit owns them, an optimizer seems to
  // hold them, or inference mode is on.
  static absl::StatusOr<std::unique_ptr<FlattenedModule>> Create(
      const std::shared_ptr<torch::nn::Module>& module,
      const FlattenOptions& options);
  // Flattens `copy`, a clone of the module, over a copy of the flat parameter,
  // on `device` if given. FailedPrecondition: `copy` lacks a parameter.
  absl::StatusOr<std::unique_ptr<FlattenedModule>> CloneFor(
      const std::shared_ptr<torch::nn::Module>& copy,
      const std::optional<c10::Device>& device) const;

  FlattenedModule(const FlattenedModule&) = delete;
  FlattenedModule& operator=(const FlattenedModule&) = delete;
  // Leaves the module with its parameters registered, over the flat memory.
  ~FlattenedModule();

  // A 1-D leaf; undefined if there are no parameters.
  const at::Tensor& flat() const { return flat_; }
  // Has one entry per distinct parameter, and no padding.
  const FlatLayout& layout() const { return *layout_; }
  bool unflattened() const { return unflattened_; }

  // Call it before every forward, unless unflattened: it follows a flat
  // parameter that was moved or frozen, and makes this forward's node.
  // FailedPrecondition: a parameter, or the flat one, looks elsewhere.
  absl::Status PreForward();

  // Registers the parameters, over `memory` if that is defined; CheckMemory()
  // must have accepted it.
  void Unflatten(const at::Tensor& memory);
  // InvalidArgument: `memory` is not contiguous, or differs from the flat
  // parameter in size, dtype or device.
  absl::Status CheckMemory(const at::Tensor& memory) const;
  // Takes values and gradients back into the flat parameter, unless Unflatten()
  // was given memory. After an error a value that does not fit is dropped.
  absl::Status Flatten();

  // Replaces the flat parameter's data by convert(data), which may have another
  // device or dtype. InvalidArgument as from Flatten().
  absl::Status Convert(
      absl::FunctionRef<at::Tensor(const at::Tensor&)> convert);
  // Copies `values` into the flat parameter. InvalidArgument: the shape
  // differs.
  absl::Status SetValues(const at::Tensor& values);

 private:
  // A key under which a module has registered something; unregistering forgets
  // the order.
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
  absl::Status CheckOutsideReferences() const;
  absl::Status CheckValues(const at::Tensor& values) const;
  void AddPlace(ModulePlace place,
                absl::FunctionRef<int(const std::string& key)> parameter_of);
  // Makes `flat` the flat parameter's data, and flattens.
  void Adopt(at::Tensor flat, bool requires_grad);
  void Register();
  void Unregister();
  at::Tensor View(const at::Tensor& memory, int i) const;
  void Bind(const at::Tensor& memory);
  bool IsBound(const at::Tensor& tensor, int i) const;
  void Attach();
  void TakeGradients();
  absl::Status TakeValues();
  absl::Status TakeRequiresGrad();

  std::vector<FlattenedPlace> places_;
  std::vector<NamedParameter> parameters_;
  std::shared_ptr<const FlatLayout> layout_;
  at::Tensor flat_;
  // The memory that the parameters look into: flat_'s data, or what Unflatten()
  // was given.
  at::Tensor bound_;
  bool unflattened_ = false;
  bool over_other_memory_ = false;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLATTENED_MODULE_H_
