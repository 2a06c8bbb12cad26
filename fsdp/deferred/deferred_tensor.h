// Tensors without memory, whose operators are recorded and run when values are
// wanted (the idea of torchdistX's deferred initialisation).
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

// Returns whether `tensor` is deferred. Costs a nanosecond.
bool IsDeferred(const at::Tensor& tensor);

// Returns the values of `tensor`. They are `tensor` itself unless it is
// deferred; then its history, the operators that lead to it, runs, and the
// result has its own memory. The tensor stays deferred. Results are equal every
// time, because random operators have their own seeds. Throws what the
// operators throw.
at::Tensor ValueOf(const at::Tensor& tensor);

// Gives the storage of a deferred tensor memory with the values of ValueOf().
// All tensors that look into the storage are then ordinary ones.
void Materialize(const at::Tensor& tensor);

namespace deferred_internal {

// Returns a tensor without memory whose storage is output `output` of `op`.
at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device);
// Notes that `op` was the last to write the storage of `tensor`, which is
// deferred.
void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op);

}  // namespace deferred_internal
}  // namespace fsdp

namespace fsdp::deferred_internal {

// Returns the deferred tensors in `value`, also those in lists.
std::vector<at::Tensor> DeferredTensorsIn(const c10::IValue& value);

// Returns whether the operator writes to the argument.
bool IsWritten(const c10::Argument& argument);

// An operator and its arguments before it runs. The arguments lie on top of
// `stack`. `op` and `stack` must outlive this object. It runs nothing except on
// meta tensors.
class CalledOperator {
 public:
  CalledOperator(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : op_(op), stack_(stack) {}

  const c10::FunctionSchema& schema() const { return op_.schema(); }
  // The arguments in the order of the schema.
  c10::ArrayRef<c10::IValue> arguments() const;
  // The index of `device` among them.
  std::optional<size_t> DeviceArgument() const;

  bool ReadsDeferred() const;
  // Returns whether it makes one dense tensor out of no other.
  bool IsFactory() const;
  bool IsView() const;
  // Returns whether it returns tensors and nothing else.
  bool ReturnsTensors() const;
  bool Writes() const;
  // Returns whether all that it writes are deferred tensors.
  bool WritesDeferredOnly() const;
  // Returns the device of its results: the one that is asked for, else that of
  // the first deferred tensor.
  c10::Device OutputDevice() const;

  // Returns what the operator returns on tensors without memory; nullopt if it
  // does not run there.
  std::optional<torch::jit::Stack> OnMeta() const;

 private:
  const c10::OperatorHandle& op_;
  const torch::jit::Stack& stack_;
};

}  // namespace fsdp::deferred_internal

#endif  // FSDP_DEFERRED_DEFERRED_TENSOR_H_
