// Tensors without memory, whose operators are recorded and run when values are
// wanted (the idea of torchdistX's deferred initialisation).
#ifndef FSDP_DEFERRED_DEFERRED_TENSOR_H_
#define FSDP_DEFERRED_DEFERRED_TENSOR_H_

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"

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

// Seeds the default generators of all devices while it lives, and restores
// them. One thread at a time may have one, and others wait, because ranks may
// be threads.
class SeedGuard {
 public:
  explicit SeedGuard(uint64_t seed);
  SeedGuard(const SeedGuard&) = delete;
  SeedGuard& operator=(const SeedGuard&) = delete;
  ~SeedGuard();

 private:
  void Seed(at::Generator generator, uint64_t seed);

  const std::lock_guard<std::recursive_mutex> only_;
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

// The rest is for DeferredInit.

class RecordedOp;

struct Geometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  c10::ScalarType dtype;
  c10::Device device = c10::Device(c10::kCPU);
  bool is_conjugated = false;
  bool is_negated = false;

  static Geometry Of(const at::Tensor& tensor);
  // Returns a view of `storage` that looks so.
  at::Tensor Over(const c10::Storage& storage) const;
};

// A tensor among an operator's arguments, as it was when the operator was
// recorded.
struct RecordedInput {
  uint64_t storage = 0;  // 0: not deferred, and among the arguments themselves
  // The last operator that wrote the storage; null: its content does not
  // matter.
  std::shared_ptr<const RecordedOp> last;
  Geometry geometry;
  int64_t version = 0;  // for one that is not deferred
};

// An operator and the state of everything that it reads. Immutable, so that
// histories share common parts; destroyed without recursion.
class RecordedOp {
 public:
  // `arguments` are all arguments, in the order of the schema. `seed` is that
  // of the generators while the operator runs. Tensors of less than
  // `copied_below` bytes are copied; others must not be changed later.
  RecordedOp(const c10::OperatorHandle& op,
             c10::ArrayRef<c10::IValue> arguments, std::optional<uint64_t> seed,
             int64_t copied_below);
  RecordedOp(const RecordedOp&) = delete;
  RecordedOp& operator=(const RecordedOp&) = delete;
  ~RecordedOp();

  // Declares output number outputs().size() a new storage.
  void AddOutput(const at::Tensor& like);

  uint64_t sequence() const { return sequence_; }
  const std::vector<RecordedInput>& inputs() const { return inputs_; }
  // The new storages, with the geometry of the tensors that were to be made.
  const std::vector<RecordedInput>& outputs() const { return outputs_; }

  // Runs the operator. `tensor_of` returns the present tensor for each deferred
  // input.
  torch::jit::Stack Run(
      absl::FunctionRef<at::Tensor(const RecordedInput&)> tensor_of) const;

 private:
  const c10::OperatorHandle op_;
  const std::optional<uint64_t> seed_;
  const uint64_t sequence_;  // order of recording; also numbers storages
  std::vector<c10::IValue> arguments_;  // deferred tensors are left undefined
  std::vector<RecordedInput> inputs_;   // all tensors, in order
  std::vector<RecordedInput> outputs_;
};

// Returns `value` with `map` applied to every tensor in it, also in lists.
c10::IValue MapTensors(const c10::IValue& value,
                       absl::FunctionRef<at::Tensor(const at::Tensor&)> map);

// Returns a tensor without memory whose storage is output `output` of `op`.
at::Tensor MakeDeferred(const std::shared_ptr<const RecordedOp>& op, int output,
                        c10::Device device);
// Notes that `op` was the last to write the storage of `tensor`, which is
// deferred.
void SetLastOp(const at::Tensor& tensor,
               const std::shared_ptr<const RecordedOp>& op);

}  // namespace fsdp

#endif  // FSDP_DEFERRED_DEFERRED_TENSOR_H_
