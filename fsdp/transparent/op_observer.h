// Sees LibTorch's operators before they run.
//
// It uses at::RecordFunction, the mechanism of profilers, which calls back
// before every operator that the dispatcher runs, also those inside other
// operators and those of backward, and before autograd looks at its inputs.
#ifndef FSDP_TRANSPARENT_OP_OBSERVER_H_
#define FSDP_TRANSPARENT_OP_OBSERVER_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <thread>
#include <vector>

#include "absl/types/span.h"

namespace fsdp {

class ShardedModel;
class UnitObserver;

class OpListener {
 public:
  virtual ~OpListener() = default;
  // An operator is about to run on the calling thread, and inputs of it look
  // into storages of `units`, each listed once. `nested` says that it runs
  // inside another operator, which may have read the addresses of its own
  // inputs already. Must not throw: LibTorch only logs what a callback throws.
  virtual void OnOperator(absl::Span<const int> units, bool nested) = 0;
  // The same operator, according to its schema, is about to write to the values
  // of `tensor`, an input that looks into a storage of `unit`. Called after
  // OnOperator() for each such input. Must not throw.
  virtual void OnWrite(const at::Tensor& tensor, int unit) = 0;
};

// The tag that makes a flat_param::GuardedStorage visible to observers.
struct StorageTag {
  OpListener* listener;
  int unit;
};

// Returns the tag of the storage that `tensor` looks into; null if there is
// none.
const StorageTag* TagOf(const at::Tensor& tensor);

// While one lives, listeners of tagged storages are told of operators on the
// thread that has made it, and on threads that take over its LibTorch state
// meanwhile: those of backward and of torch::jit::fork. Each operator of the
// thread costs up to a microsecond more (//benchmarks:control_plane_benchmark).
// Destroy it on its own thread, or that thread keeps the cost.
class OpObserver {
 public:
  OpObserver();
  OpObserver(const OpObserver&) = delete;
  OpObserver& operator=(const OpObserver&) = delete;
  ~OpObserver();

 private:
  const std::thread::id thread_;
};

// Tags the storages of all units of a model while it lives.
class ModelTags {
 public:
  // Both arguments must outlive it.
  ModelTags(ShardedModel& model, OpListener* listener);
  ModelTags(const ModelTags&) = delete;
  ModelTags& operator=(const ModelTags&) = delete;
  ~ModelTags();

 private:
  ShardedModel& model_;
  std::vector<StorageTag> tags_;  // by unit
};

// Makes an observer that finds writes to whole parameters that no version
// counter shows, such as weight.data().clamp_(-1, 1) in a forward. Such a write
// would be lost in a copy, but kept for all ranks in shared memory. The
// operator fails, and the forward is refused as one that modifies a parameter
// in place.
//
// It watches the operators of each unit's first forward with grad and without,
// in training mode and out of it. A model that writes to parameters does so
// every time, and later forwards cost nothing. `model` owns the result.
std::unique_ptr<UnitObserver> MakeWriteWatch(ShardedModel* model);

// Makes an observer of units that are called directly (transparent.cc). `model`
// owns the result.
std::unique_ptr<UnitObserver> MakeTransparentUnits(ShardedModel* model);

}  // namespace fsdp

#endif  // FSDP_TRANSPARENT_OP_OBSERVER_H_
