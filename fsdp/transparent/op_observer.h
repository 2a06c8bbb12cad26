// Sees LibTorch's operators before they run.
//
// at::RecordFunction, the mechanism of profilers, calls back at the start of
// every operator that the dispatcher runs, those inside other operators and
// those of backward included, and before the operator's autograd kernel looks
// at its inputs.
#ifndef FSDP_TRANSPARENT_OP_OBSERVER_H_
#define FSDP_TRANSPARENT_OP_OBSERVER_H_

#include <ATen/core/Tensor.h>

#include <thread>

#include "absl/types/span.h"

namespace fsdp {

class OpListener {
 public:
  virtual ~OpListener() = default;
  // An operator is about to run in the calling thread, and inputs of it look
  // into storages of `units`, each listed once. `nested`: it runs inside
  // another operator, which may have read the addresses of its own inputs
  // already. Must not throw: LibTorch logs what a callback throws and goes on.
  virtual void OnOperator(absl::Span<const int> units, bool nested) = 0;
  // The same operator, as by its schema, is about to write to the values of
  // `tensor`, an input that looks into a storage of `unit`. After
  // OnOperator(), for each such input. Must not throw.
  virtual void OnWrite(const at::Tensor& tensor, int unit) = 0;
};

// What a flat_param::GuardedStorage is tagged with to be seen.
struct StorageTag {
  OpListener* listener;
  int unit;
};

// The tag of the storage `tensor` looks into; null where there is none.
const StorageTag* TagOf(const at::Tensor& tensor);

// While one is alive, the listeners of tagged storages are told of operators of
// the thread that has made it, and of threads that take over its LibTorch state
// meanwhile: those of backward and of torch::jit::fork. Costs every operator of
// the thread up to a microsecond (//benchmarks:transparent_benchmark). Destroy
// it in its own thread, or that thread goes on paying.
class OpObserver {
 public:
  OpObserver();
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;
  ~OpObserver();

 private:
  const std::thread::id thread_;
};

}  // namespace fsdp

#endif  // FSDP_TRANSPARENT_OP_OBSERVER_H_
