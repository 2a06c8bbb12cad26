#include "fsdp/deferred/called_operator.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Layout.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "base/torch_status.h"
#include "fsdp/deferred/deferred_tensor.h"
#include "fsdp/deferred/recorded_op.h"

namespace fsdp::deferred_internal {
namespace {

using torch::jit::Stack;

at::Tensor MetaOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(
      tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kMeta).requires_grad(false));
}

}  // namespace

std::vector<at::Tensor> DeferredTensorsIn(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  MapTensors(value, [&found](const at::Tensor& tensor) {
    if (IsDeferred(tensor)) found.push_back(tensor);
    return tensor;
  });
  return found;
}

bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

c10::ArrayRef<c10::IValue> CalledOperator::arguments() const {
  return torch::jit::last(stack_, schema().arguments().size());
}

std::optional<size_t> CalledOperator::DeviceArgument() const {
  const std::optional<int> index = schema().argumentIndexWithName("device");
  return index.has_value() ? std::optional<size_t>(*index) : std::nullopt;
}

bool CalledOperator::ReadsDeferred() const {
  return std::any_of(arguments().begin(), arguments().end(),
                     [](const c10::IValue& argument) {
                       return !DeferredTensorsIn(argument).empty();
                     });
}

bool CalledOperator::IsFactory() const {
  if (schema().returns().size() != 1 || !DeviceArgument().has_value() ||
      schema().returns()[0].type()->kind() != c10::TypeKind::TensorType) {
    return false;
  }
  const c10::ArrayRef<c10::IValue> values = arguments();
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor() || values[i].isTensorList()) return false;
    if (schema().arguments()[i].name() == "layout" && values[i].isInt() &&
        values[i].toLayout() != c10::kStrided) {
      return false;
    }
  }
  return true;
}

bool CalledOperator::IsView() const {
  return std::any_of(schema().returns().begin(), schema().returns().end(),
                     [](const c10::Argument& result) {
                       return result.alias_info() != nullptr &&
                              !IsWritten(result);
                     });
}

bool CalledOperator::ReturnsTensors() const {
  return std::all_of(schema().returns().begin(), schema().returns().end(),
                     [](const c10::Argument& result) {
                       return result.type()->kind() ==
                              c10::TypeKind::TensorType;
                     });
}

bool CalledOperator::Writes() const {
  return std::any_of(schema().arguments().begin(), schema().arguments().end(),
                     IsWritten);
}

bool CalledOperator::WritesDeferredOnly() const {
  const c10::ArrayRef<c10::IValue> values = arguments();
  for (size_t i = 0; i < values.size(); ++i) {
    if (IsWritten(schema().arguments()[i]) &&
        !(values[i].isTensor() && IsDeferred(values[i].toTensor()))) {
      return false;
    }
  }
  return true;
}

c10::Device CalledOperator::OutputDevice() const {
  if (const std::optional<size_t> index = DeviceArgument()) {
    const c10::IValue wanted = arguments()[*index];
    if (wanted.isDevice()) return wanted.toDevice();
  }
  for (const c10::IValue& argument : arguments()) {
    const std::vector<at::Tensor> deferred = DeferredTensorsIn(argument);
    if (!deferred.empty()) return deferred.front().device();
  }
  return c10::Device(c10::kCPU);
}

std::optional<Stack> CalledOperator::OnMeta() const {
  Stack meta;
  for (const c10::IValue& argument : arguments()) {
    meta.push_back(argument.isGenerator() ? c10::IValue()
                                          : MapTensors(argument, MetaOf));
  }
  if (const std::optional<size_t> device = DeviceArgument()) {
    meta[*device] = c10::Device(c10::kMeta);
  }
  if (const auto pinned = schema().argumentIndexWithName("pin_memory")) {
    meta[*pinned] = c10::IValue();
  }
  const absl::Status status =
      TorchToStatus("on meta", [&] { op_.callBoxed(&meta); });
  return status.ok() ? std::optional(std::move(meta)) : std::nullopt;
}

}  // namespace fsdp::deferred_internal
