#include "fsdp/deferred/deferred_init.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Layout.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ArrayRef.h>
#include <torch/library.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "base/torch_status.h"
#include "fsdp/deferred/deferred_tensor.h"

namespace fsdp {
namespace {

using torch::jit::Stack;

// The threshold of the innermost scope on this thread.
thread_local int64_t min_deferred_bytes = 0;

// Draws from the caller's generator if it is one of the CPU, else from the
// default one.
uint64_t DrawSeed(c10::ArrayRef<c10::IValue> arguments) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  for (const c10::IValue& argument : arguments) {
    if (argument.isGenerator() && argument.toGenerator().device().is_cpu()) {
      generator = argument.toGenerator();
    }
  }
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

at::Tensor MetaOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(
      tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kMeta).requires_grad(false));
}

// Throws for what has no geometry that could be recorded.
at::Tensor CheckStrided(const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.defined() || tensor.layout() == at::kStrided,
              "a sparse tensor has values at once");
  return tensor;
}

// Returns the deferred tensors in `value`, also those in lists.
std::vector<at::Tensor> DeferredTensorsIn(const c10::IValue& value) {
  std::vector<at::Tensor> found;
  MapTensors(value, [&found](const at::Tensor& tensor) {
    if (IsDeferred(tensor)) found.push_back(tensor);
    return tensor;
  });
  return found;
}

// Returns whether the operator writes to the argument.
bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns the current device of a kind that has one, where no index says which.
c10::Device Indexed(c10::Device device) {
  if (device.has_index() || device.is_cpu() ||
      !c10::impl::hasDeviceGuardImpl(device.type())) {
    return device;
  }
  const auto* const devices = c10::impl::getDeviceGuardImpl(device.type());
  return devices->deviceCount() > 0 ? devices->getDevice() : device;
}

// An operator with its arguments on top of `stack`, which it runs or records.
class OperatorRecorder {
 public:
  OperatorRecorder(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void Run() {
    if (op_.hasKernelForDispatchKey(
            c10::DispatchKey::CompositeImplicitAutograd)) {
      // Each of the operators that it is made of comes here.
      op_.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd,
                                  stack_);
      return;
    }
    const c10::impl::ExcludeDispatchKeyGuard unrecorded(
        c10::DispatchKey::DeferredInit);
    if (ReadsDeferred()) {
      RunOnDeferred();
    } else if (IsFactory()) {
      RunFactory();
    } else {
      op_.callBoxed(stack_);
    }
  }

 private:
  // The arguments in the order of the schema.
  c10::ArrayRef<c10::IValue> arguments() const {
    return torch::jit::last(stack_, schema_.arguments().size());
  }
  // The index of `device` among them.
  std::optional<int> DeviceArgument() const {
    return schema_.argumentIndexWithName("device");
  }

  bool ReadsDeferred() const {
    return absl::c_any_of(arguments(), [](const c10::IValue& argument) {
      return !DeferredTensorsIn(argument).empty();
    });
  }
  // Returns whether it makes one dense tensor out of no other.
  bool IsFactory() const {
    if (schema_.returns().size() != 1 || !DeviceArgument().has_value() ||
        schema_.returns()[0].type()->kind() != c10::TypeKind::TensorType) {
      return false;
    }
    const c10::ArrayRef<c10::IValue> values = arguments();
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i].isTensor() || values[i].isTensorList()) return false;
      if (schema_.arguments()[i].name() == "layout" && values[i].isInt() &&
          values[i].toLayout() != c10::kStrided) {
        return false;
      }
    }
    return true;
  }
  bool IsView() const {
    return absl::c_any_of(schema_.returns(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !IsWritten(result);
    });
  }
  // Returns whether it returns tensors and nothing else.
  bool ReturnsTensors() const {
    return absl::c_all_of(schema_.returns(), [](const c10::Argument& result) {
      return result.type()->kind() == c10::TypeKind::TensorType;
    });
  }
  bool Writes() const { return absl::c_any_of(schema_.arguments(), IsWritten); }
  // Returns whether all that it writes are deferred tensors.
  bool WritesDeferredOnly() const {
    const c10::ArrayRef<c10::IValue> values = arguments();
    for (size_t i = 0; i < values.size(); ++i) {
      if (IsWritten(schema_.arguments()[i]) &&
          !(values[i].isTensor() && IsDeferred(values[i].toTensor()))) {
        return false;
      }
    }
    return true;
  }
  // Returns the device of its results: the one that is asked for, else that of
  // the first deferred tensor.
  c10::Device OutputDevice() const {
    if (const std::optional<int> index = DeviceArgument()) {
      const c10::IValue wanted = arguments()[*index];
      if (wanted.isDevice()) return Indexed(wanted.toDevice());
    }
    for (const c10::IValue& argument : arguments()) {
      const std::vector<at::Tensor> deferred = DeferredTensorsIn(argument);
      if (!deferred.empty()) return deferred.front().device();
    }
    return c10::Device(c10::kCPU);
  }

  // Returns what the operator returns on tensors without memory; nullopt if it
  // does not run there.
  std::optional<Stack> OnMeta() const {
    Stack meta;
    const absl::Status status = TorchToStatus("on meta", [&] {
      for (const c10::IValue& argument : arguments()) {
        meta.push_back(argument.isGenerator() ? c10::IValue()
                                              : MapTensors(argument, MetaOf));
      }
      if (const std::optional<int> device = DeviceArgument()) {
        meta[*device] = c10::Device(c10::kMeta);
      }
      if (const auto pinned = schema_.argumentIndexWithName("pin_memory")) {
        meta[*pinned] = c10::IValue();
      }
      op_.callBoxed(&meta);
      for (const c10::IValue& result : meta) MapTensors(result, CheckStrided);
    });
    return status.ok() ? std::optional(std::move(meta)) : std::nullopt;
  }

  void RunFactory() {
    const std::optional<Stack> made = OnMeta();
    if (!made.has_value() ||
        static_cast<int64_t>(made->back().toTensor().nbytes()) <
            min_deferred_bytes) {
      op_.callBoxed(stack_);
      return;
    }
    const c10::Device device = OutputDevice();
    // The defaults may have changed by the time it runs.
    SetArgument("device", device);
    SetArgument("dtype", made->back().toTensor().scalar_type());
    ReturnDeferred(*made, device);
  }

  void SetArgument(const char* name, const c10::IValue& value) {
    const std::optional<int> index = schema_.argumentIndexWithName(name);
    if (!index.has_value()) return;
    stack_[stack_.size() - schema_.arguments().size() + *index] = value;
  }

  void RunOnDeferred() {
    // These operators change a tensor's geometry, not its values.
    if (IsView() || op_.hasTag(at::Tag::inplace_view)) {
      op_.callBoxed(stack_);
      return;
    }
    const std::optional<Stack> made = OnMeta();
    if (made.has_value() && ReturnsTensors()) {
      if (!Writes()) {
        return ReturnDeferred(*made, OutputDevice());
      }
      if (WritesDeferredOnly()) return RecordWrite();
    }
    RunOnValues();
  }

  std::shared_ptr<RecordedOp> Record() const {
    std::optional<uint64_t> seed;
    if (op_.hasTag(at::Tag::nondeterministic_seeded)) {
      seed = DrawSeed(arguments());
    }
    return std::make_shared<RecordedOp>(op_, arguments(), seed,
                                        min_deferred_bytes);
  }

  void Return(std::vector<c10::IValue> results) {
    torch::jit::drop(stack_, schema_.arguments().size());
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

  // `made` has the results without memory and history.
  void ReturnDeferred(const Stack& made, c10::Device device) {
    const std::shared_ptr<RecordedOp> op = Record();
    for (const c10::IValue& result : made) op->AddOutput(result.toTensor());
    std::vector<c10::IValue> results;
    results.reserve(made.size());
    for (size_t i = 0; i < made.size(); ++i) {
      results.emplace_back(MakeDeferred(op, static_cast<int>(i), device));
    }
    Return(std::move(results));
  }

  void RecordWrite() {
    const std::shared_ptr<RecordedOp> op = Record();
    const c10::ArrayRef<c10::IValue> values = arguments();
    std::vector<c10::IValue> results;
    for (const c10::Argument& result : schema_.returns()) {
      for (size_t i = 0; i < values.size(); ++i) {
        const c10::Argument& argument = schema_.arguments()[i];
        if (IsWritten(argument) &&
            *argument.alias_info() == *result.alias_info()) {
          results.push_back(values[i]);
        }
      }
    }
    for (size_t i = 0; i < values.size(); ++i) {
      if (IsWritten(schema_.arguments()[i]))
        SetLastOp(values[i].toTensor(), op);
    }
    Return(std::move(results));
  }

  // Runs the operator after giving memory to what it writes.
  void RunOnValues() {
    const size_t first = stack_.size() - schema_.arguments().size();
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      c10::IValue& argument = stack_[first + i];
      if (IsWritten(schema_.arguments()[i])) {
        for (const at::Tensor& tensor : DeferredTensorsIn(argument)) {
          Materialize(tensor);
        }
      } else {
        argument = MapTensors(argument, ValueOf);
      }
    }
    op_.callBoxed(stack_);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
};

void OnOperator(const c10::OperatorHandle& op, Stack* stack) {
  OperatorRecorder(op, *stack).Run();
}

// LibTorch reserves this dispatch key for deferred initialization.
TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&OnOperator>());
}

}  // namespace

DeferredInit::DeferredInit(const DeferredInitOptions& options)
    : outer_min_bytes_(std::exchange(min_deferred_bytes, options.min_bytes)),
      records_(c10::DispatchKey::DeferredInit) {}

DeferredInit::~DeferredInit() { min_deferred_bytes = outer_min_bytes_; }

bool DeferredInit::IsActive() {
  const c10::DispatchKey key = c10::DispatchKey::DeferredInit;
  return c10::impl::tls_is_dispatch_key_included(key) &&
         !c10::impl::tls_is_dispatch_key_excluded(key);
}

absl::Status Materialize(torch::nn::Module& module) {
  return TorchToStatus("initialising a deferred module", [&module] {
    for (const at::Tensor& parameter : module.parameters()) {
      Materialize(parameter);
    }
    for (const at::Tensor& buffer : module.buffers()) Materialize(buffer);
  });
}

}  // namespace fsdp
