#include "flat_param/flatten_params_wrapper.h"

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch_status.h"

namespace fsdp::flat_param {
namespace {

constexpr char kFlatParam[] = "flat_param";
constexpr char kModule[] = "module";

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
  for (const auto& item : expected) {
    const at::Tensor* tensor = actual.find(item.key());
    if (tensor == nullptr) {
      if (strict) found.push_back(absl::StrCat(item.key(), " is missing"));
    } else if (!tensor->defined()) {
      found.push_back(absl::StrCat(item.key(), " is undefined"));
    } else if (tensor->sizes() != item.value().sizes()) {
      found.push_back(c10::str(item.key(), " has sizes ", tensor->sizes(),
                               ", not ", item.value().sizes()));
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

UnflattenedParams::UnflattenedParams(
    std::shared_ptr<FlattenParamsWrapperBase> wrapper,
    const at::Tensor& flat_data)
    : wrapper_(std::move(wrapper)) {
  if (!wrapper_->flat_param().defined()) {
    wrapper_ = nullptr;
    return;
  }
  if (flat_data.defined()) {
    ThrowIfError(wrapper_->flattened_->CheckMemory(flat_data));
  }
  wrapper_->flattened_->Unflatten(flat_data);
  wrapper_->parameters_.erase(kFlatParam);
}

UnflattenedParams::~UnflattenedParams() { Close().IgnoreError(); }

absl::Status UnflattenedParams::Close() {
  const std::shared_ptr<FlattenParamsWrapperBase> wrapper = std::move(wrapper_);
  if (wrapper == nullptr) return absl::OkStatus();
  absl::Status status = wrapper->flattened_->Flatten();
  wrapper->ShowFlatParam();
  return status;
}

FlattenParamsWrapperBase::FlattenParamsWrapperBase(
    std::shared_ptr<torch::nn::Module> module,
    std::unique_ptr<FlattenedModule> flattened)
    : WrapperModule("fsdp::flat_param::FlattenParamsWrapper"),
      wrapped_(register_module(kModule, std::move(module))),
      flattened_(std::move(flattened)) {
  ShowFlatParam();
}

void FlattenParamsWrapperBase::ShowFlatParam() {
  if (has_params()) parameters_.insert(kFlatParam, flattened_->flat());
}

UnflattenedParams FlattenParamsWrapperBase::UnflattenAsParams(
    const at::Tensor& flat_data) {
  return UnflattenedParams(
      std::static_pointer_cast<FlattenParamsWrapperBase>(shared_from_this()),
      flat_data);
}

// Is for functions that leave the wrapper as it was.
UnflattenedParams FlattenParamsWrapperBase::Originals() const {
  return const_cast<FlattenParamsWrapperBase*>(this)->UnflattenAsParams();
}

void FlattenParamsWrapperBase::save(
    torch::serialize::OutputArchive& archive) const {
  const UnflattenedParams scope = Originals();
  wrapped_->save(archive);
}

void FlattenParamsWrapperBase::load(torch::serialize::InputArchive& archive) {
  UnflattenedParams scope = UnflattenAsParams();
  wrapped_->load(archive);
  ThrowIfError(Annotate(scope.Close(), "loading an archive"));
}

template <typename... Args>
void FlattenParamsWrapperBase::Convert(Args... args) {
  // A module may look its parameters up by name, as LSTM does.
  UnflattenedParams scope = UnflattenAsParams();
  const absl::Status converted = flattened_->Convert(
      [&](const at::Tensor& flat) { return flat.to(args...); });
  wrapped_->to(args...);
  ThrowIfError(converted);
  ThrowIfError(Annotate(scope.Close(), "converting"));
}

// NOLINTBEGIN(google-default-arguments): as LibTorch declares them.
void FlattenParamsWrapperBase::to(torch::Device device, torch::Dtype dtype,
                                  bool non_blocking) {
  Convert(device, dtype, non_blocking);
}

void FlattenParamsWrapperBase::to(torch::Dtype dtype, bool non_blocking) {
  Convert(dtype, non_blocking);
}

void FlattenParamsWrapperBase::to(torch::Device device, bool non_blocking) {
  Convert(device, non_blocking);
}
// NOLINTEND(google-default-arguments)

void FlattenParamsWrapperBase::pretty_print(std::ostream& stream) const {
  stream << name() << "(" << num_params_managed() << " parameters, "
         << layout().numel() << " elements)";
}

std::shared_ptr<torch::nn::Module> FlattenParamsWrapperBase::CloneWrapped(
    const std::optional<torch::Device>& device) const {
  const UnflattenedParams scope = Originals();
  return wrapped_->clone(device);
}

void FlattenParamsWrapperBase::MoveFrom(FlattenParamsWrapperBase& other) {
  torch::nn::Module::operator=(other);
  wrapped_ = std::move(other.wrapped_);
  flattened_ = std::move(other.flattened_);
}

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
