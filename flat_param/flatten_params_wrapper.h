// A module whose parameters are one flat parameter: FlattenParamsWrapper of
// fairscale and PyTorch for LibTorch modules. It is for optimizers and
// all-reduces that prefer one large tensor to many small ones, and needs no
// communicator.
//
//   auto net = fsdp::ValueOrThrow(fsdp::flat_param::FlattenParams(
//       torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::ReLU(),
//                             torch::nn::Linear(16, 1))));
//   torch::optim::SGD optimizer(net->parameters(), 0.1);  // one tensor
//   net->forward(x).sum().backward();                     // one gradient
//   optimizer.step();
//   torch::save(net, "net.pt");  // as the Sequential's own
//
// Wrappers nest: each owns the parameters that no wrapper inside it owns. Names
// in archives and maps are those of the unwrapped modules.
//
// C++ makes some things different from Python. `net->` is the wrapper and does
// not reach members of the wrapped module, which are at net.module()->. Tensors
// in such members are the parameters all the time, not attributes that forward
// replaces, so children may be called directly too. LibTorch cannot unregister
// parameters, so they are taken out of the modules' dictionaries through a
// protected member. A parent's reset() makes its clone, and therefore has to
// create the wrapper itself, or hold it in a Sequential or ModuleList.
//
// Not thread-safe. Calls return absl::Status if they can; functions that
// override or resemble those of torch::nn::Module throw, StatusError for their
// own errors.
#ifndef FLAT_PARAM_FLATTEN_PARAMS_WRAPPER_H_
#define FLAT_PARAM_FLATTEN_PARAMS_WRAPPER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/module_forward.h"
#include "base/status_macros.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/layout.h"
#include "flat_param/module_walk.h"

namespace fsdp::flat_param {

// Selects what FlattenParams() flattens, and with which values.
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

// The parameters of a module as one trainable 1-D tensor, and the way back: a
// wrapper without the C++ type of the module.
//
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
  // trainable ones, one that is not dense or in a ParameterList or
  // ParameterDict, or an overlap; or flat_data does not fit.
  // FailedPrecondition: a sharded unit owns them, an optimizer seems to hold
  // them, or inference mode is on.
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
  // Returns whether it is between Unflatten() and Flatten().
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

class FlattenParamsWrapperBase;

// While this lives, a wrapper's parameters are parameters of the wrapped module
// again, and the flat one is hidden. UnflattenAsParams() makes it.
class UnflattenedParams {
 public:
  UnflattenedParams(const UnflattenedParams&) = delete;
  UnflattenedParams& operator=(const UnflattenedParams&) = delete;
  // Calls Close() and ignores its error.
  ~UnflattenedParams();

  // Ends the scope. InvalidArgument names parameters: one was given data of
  // another size, which is dropped, or some but not all were frozen, which is
  // undone.
  absl::Status Close();

 private:
  friend class FlattenParamsWrapperBase;
  UnflattenedParams(std::shared_ptr<FlattenParamsWrapperBase> wrapper,
                    const at::Tensor& flat_data);

  std::shared_ptr<FlattenParamsWrapperBase> wrapper_;  // null: nothing to do
};

// A wrapper without the wrapped module's type.
class FlattenParamsWrapperBase : public WrapperModule {
 public:
  // Returns the one 1-D parameter, as in named_parameters(). It is undefined if
  // there are no parameters and while they are unflattened. Freeze it by
  // set_requires_grad(false).
  at::Tensor flat_param() const {
    return flattened_->unflattened() ? at::Tensor() : flattened_->flat();
  }
  // Returns whether there are any, flattened or not.
  bool has_params() const { return num_params_managed() > 0; }
  // Tied parameters count once.
  int num_params_managed() const { return layout().num_parameters(); }
  // Returns names, sizes, strides and places of the parameters in the flat one,
  // which has no padding.
  const FlatLayout& layout() const { return flattened_->layout(); }

  // Makes the wrapped module's parameters leaves that look into the flat
  // parameter, registered under their own names, until the result is destroyed.
  // Values written into them, or given to them by set_data(), go into the flat
  // parameter, and so do their gradients. Does nothing if there are no
  // parameters or they are unflattened.
  //
  // With `flat_data` they look into that instead, and the flat parameter stays
  // as it is. Throws StatusError (InvalidArgument) if `flat_data` differs from
  // flat_param() in more than values.
  [[nodiscard]] UnflattenedParams UnflattenAsParams(
      const at::Tensor& flat_data = at::Tensor());
  // Copies `flat_data` into the flat parameter. InvalidArgument: it is not 1-D
  // or has another number of elements.
  absl::Status SetFlatData(const at::Tensor& flat_data) {
    return flattened_->SetValues(flat_data);
  }

  // Archives have the wrapped module's own names, as if there were no wrapper.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  // NOLINTBEGIN(google-default-arguments): as LibTorch declares them.
  void to(torch::Device device, torch::Dtype dtype,
          bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  // NOLINTEND(google-default-arguments)
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> wrapped_module() const override {
    return wrapped_;
  }

 protected:
  FlattenParamsWrapperBase(std::shared_ptr<torch::nn::Module> module,
                           std::unique_ptr<FlattenedModule> flattened);

  // Copy the wrapped module and its flattening.
  std::shared_ptr<torch::nn::Module> CloneWrapped(
      const std::optional<torch::Device>& device) const;
  std::unique_ptr<FlattenedModule> CloneFlattened(
      const std::shared_ptr<torch::nn::Module>& copy,
      const std::optional<torch::Device>& device) const {
    return ValueOrThrow(flattened_->CloneFor(copy, device));
  }
  // Takes over the parts of `other`, which is left empty.
  void MoveFrom(FlattenParamsWrapperBase& other);
  // Throws the errors of FlattenedModule::PreForward().
  void PreForward() { ThrowIfError(flattened_->PreForward()); }

 private:
  friend class UnflattenedParams;

  template <typename... Args>
  void Convert(Args... args);
  void ShowFlatParam();
  UnflattenedParams Originals() const;

  std::shared_ptr<torch::nn::Module> wrapped_;
  std::unique_ptr<FlattenedModule> flattened_;
};

namespace internal {

struct CallFlattened {
  template <typename Wrapper, typename... Args>
  static decltype(auto) Call(Wrapper& wrapper, Args&&... args) {
    return wrapper.CallWrapped(std::forward<Args>(args)...);
  }
};

}  // namespace internal

// The flattened `M`, a module class such as torch::nn::LinearImpl. forward()
// has the signature and the default arguments of M's, which must be one
// function and not a template.
template <typename M>
class FlattenParamsWrapperImpl
    : public FlattenParamsWrapperBase,
      public ForwardLike<FlattenParamsWrapperImpl<M>, M,
                         internal::CallFlattened> {
 public:
  FlattenParamsWrapperImpl(std::shared_ptr<M> module,
                           std::unique_ptr<FlattenedModule> flattened)
      : FlattenParamsWrapperBase(module, std::move(flattened)),
        module_(std::move(module)) {}

  // The wrapped module, whose parameters look into the flat one.
  const std::shared_ptr<M>& module() const { return module_; }

  // Indexes a container.
  template <typename Index>
  decltype(auto) operator[](Index&& index) {
    return (*module_)[std::forward<Index>(index)];
  }

  // NOLINTNEXTLINE(google-default-arguments): as LibTorch declares it.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device =
          std::nullopt) const override {
    return Clone(device);
  }

 private:
  friend internal::CallFlattened;

  template <typename... Args>
  decltype(auto) CallWrapped(Args&&... args) {
    PreForward();
    return module_->forward(std::forward<Args>(args)...);
  }

  std::shared_ptr<FlattenParamsWrapperImpl> Clone(
      const std::optional<torch::Device>& device) const {
    auto copy = std::dynamic_pointer_cast<M>(CloneWrapped(device));
    return std::make_shared<FlattenParamsWrapperImpl>(
        copy, CloneFlattened(copy, device));
  }

  // A Cloneable parent copies its children by this.
  void clone_(torch::nn::Module& other,
              const std::optional<torch::Device>& device) override {
    auto copy = dynamic_cast<FlattenParamsWrapperImpl&>(other).Clone(device);
    MoveFrom(*copy);
    module_ = std::move(copy->module_);
  }

  std::shared_ptr<M> module_;
};

// A holder with the value semantics of torch::nn modules: copies refer to the
// same module.
template <typename M>
class FlattenParamsWrapper
    : public torch::nn::ModuleHolder<FlattenParamsWrapperImpl<M>> {
 public:
  using torch::nn::ModuleHolder<FlattenParamsWrapperImpl<M>>::ModuleHolder;

  // The wrapped module.
  const std::shared_ptr<M>& module() const { return this->get()->module(); }
};

// Flattens the parameters of `module`. While the wrapper lives, `module` cannot
// be cloned or saved by itself; then it has its parameters back. Put several
// wrappers around one another for several groups of parameters. Errors are
// those of FlattenedModule::Create().
template <typename M>
absl::StatusOr<FlattenParamsWrapper<M>> FlattenParams(
    std::shared_ptr<M> module,
    const FlattenOptions& options = FlattenOptions()) {
  FSDP_ASSIGN_OR_RETURN(std::unique_ptr<FlattenedModule> flattened,
                        FlattenedModule::Create(module, options));
  return FlattenParamsWrapper<M>(std::make_shared<FlattenParamsWrapperImpl<M>>(
      std::move(module), std::move(flattened)));
}

// The same for a module holder, such as torch::nn::Linear.
template <typename M>
absl::StatusOr<FlattenParamsWrapper<M>> FlattenParams(
    const torch::nn::ModuleHolder<M>& module,
    const FlattenOptions& options = FlattenOptions()) {
  return FlattenParams(module.ptr(), options);
}

// The state of a module as a map by name, without wrappers in the names: the
// state dict of Python's modules, which LibTorch lacks.
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

// The form in which parameters of a FlattenParamsWrapper appear.
enum class StateForm {
  kOriginal,  // under their own names and shapes, as without wrappers
  kFlat,      // as the wrapper's "flat_param", "blocks.0.flat_param" if nested,
              // "flat_param_1" of the inner of two around one module
};

// Returns each module's parameters, then its buffers, then its children's. Tied
// parameters appear under each of their names. Children that are not
// serializable are left out. The tensors require no grad and share memory with
// the module; clone them to keep values.
NamedTensors StateDict(const std::shared_ptr<torch::nn::Module>& module,
                       StateForm form = StateForm::kOriginal);

// Copies `tensors`, of any dtype and device, into the parameters and buffers of
// their names. InvalidArgument lists every difference, and nothing is copied: a
// size differs, or a name is missing in `tensors` or in the module. Without
// `strict`, names that are missing on one side are skipped.
absl::Status LoadStateDict(const std::shared_ptr<torch::nn::Module>& module,
                           const NamedTensors& tensors, bool strict = true,
                           StateForm form = StateForm::kOriginal);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_FLATTEN_PARAMS_WRAPPER_H_
