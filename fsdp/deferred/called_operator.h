// An operator and the arguments that it is called with: what can be told before
// it runs.
#ifndef FSDP_DEFERRED_CALLED_OPERATOR_H_
#define FSDP_DEFERRED_CALLED_OPERATOR_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace fsdp::deferred_internal {

// Those in `value`, also in lists.
std::vector<at::Tensor> DeferredTensorsIn(const c10::IValue& value);

// Whether the operator writes to it.
bool IsWritten(const c10::Argument& argument);

// Looks at `stack`, on which the arguments lie on top; it and `op` outlive
// this. Runs nothing but on meta tensors.
class CalledOperator {
 public:
  CalledOperator(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op), stack_(stack) {}

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  // In the order of the schema.
  c10::ArrayRef<c10::IValue> arguments() const;
  // The place of `device` among them.
  std::optional<size_t> DeviceArgument() const;

  bool ReadsDeferred() const;
  // Makes one dense tensor out of no other.
  bool IsFactory() const;
  bool IsView() const;
  // And nothing else.
  bool ReturnsTensors() const;
  bool Writes() const;
  // What it writes are deferred tensors.
  bool WritesDeferredOnly() const;
  // Of what it returns: that which is asked for, else the first deferred
  // tensor's.
  c10::Device OutputDevice() const;

  // The same operator on tensors without memory: what it would return. nullopt:
  // it does not run there.
  std::optional<torch::jit::Stack> OnMeta() const;

 private:
  const c10::OperatorHandle& op_;
  const torch::jit::Stack& stack_;
};

}  // namespace fsdp::deferred_internal

#endif  // FSDP_DEFERRED_CALLED_OPERATOR_H_
