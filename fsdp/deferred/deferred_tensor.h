// Tensors that have no memory but know how their values come about: what was
// run on them is recorded and runs when the values are wanted (the idea of
// torchdistX's deferred initialisation).
#ifndef FSDP_DEFERRED_DEFERRED_TENSOR_H_
#define FSDP_DEFERRED_DEFERRED_TENSOR_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/deferred/recorded_op.h"

namespace fsdp {

// Whether the storage of `tensor` is one of these. Costs a nanosecond.
bool IsDeferred(const at::Tensor& tensor);

// The values of a tensor: itself, unless it is deferred; then the operators
// that lead to it are run, its history, and the result is in memory of its own.
// The tensor stays deferred. Equal results every time: random operators have
// seeds of their own. Throws what the operators throw.
at::Tensor ValueOf(const at::Tensor& tensor);

// Gives the storage of a deferred tensor memory with the values of ValueOf().
// All tensors that look into it are ordinary ones afterwards.
void Materialize(const at::Tensor& tensor);

namespace deferred_internal {

// A tensor without memory whose storage is output `output` of `op`.
at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device);
// `op` has been the last to write the storage of `tensor`, which is deferred.
void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op);

}  // namespace deferred_internal
}  // namespace fsdp

// An operator and the arguments that it is called with: what can be told before
// it runs.

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

#endif  // FSDP_DEFERRED_DEFERRED_TENSOR_H_
