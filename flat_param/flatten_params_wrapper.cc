#include "flat_param/flatten_params_wrapper.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <optional>
#include <ostream>
#include <utility>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flattened_module.h"

namespace fsdp::flat_param {
namespace {

constexpr char kFlatParam[] = "flat_param";
constexpr char kModule[] = "module";

// Unflattens for a function that leaves the wrapper's own dictionary alone.
class Unflattened {
 public:
  explicit Unflattened(FlattenedModule& flattened)
      : flattened_(flattened), active_(!flattened.unflattened()) {
    if (active_) flattened_.Unflatten(at::Tensor());
  }
  Unflattened(const Unflattened&) = delete;
  Unflattened& operator=(const Unflattened&) = delete;
  ~Unflattened() { Close().IgnoreError(); }

  absl::Status Close() {
    return std::exchange(active_, false) ? flattened_.Flatten()
                                         : absl::OkStatus();
  }

 private:
  FlattenedModule& flattened_;
  bool active_;
};

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
  const absl::Status status = wrapper->flattened_->Flatten();
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

void FlattenParamsWrapperBase::save(
    torch::serialize::OutputArchive& archive) const {
  Unflattened scope(*flattened_);
  wrapped_->save(archive);
}

void FlattenParamsWrapperBase::load(torch::serialize::InputArchive& archive) {
  Unflattened scope(*flattened_);
  wrapped_->load(archive);
  ThrowIfError(Annotate(scope.Close(), "loading an archive"));
}

template <typename... Args>
void FlattenParamsWrapperBase::Convert(Args... args) {
  wrapped_->to(args...);
  ThrowIfError(flattened_->Convert(
      [&](const at::Tensor& flat) { return flat.to(args...); }));
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
  Unflattened scope(*flattened_);
  return wrapped_->clone(device);
}

void FlattenParamsWrapperBase::MoveFrom(FlattenParamsWrapperBase& other) {
  torch::nn::Module::operator=(other);
  wrapped_ = std::move(other.wrapped_);
  flattened_ = std::move(other.flattened_);
}

}  // namespace fsdp::flat_param
