// Sees LibTorch's operators before they run.
//
// It uses at::RecordFunction, the mechanism of profilers, which calls back
// before every operator that the dispatcher runs, also those inside other
// operators and those of backward, and before autograd looks at its inputs.
#ifndef FSDP_TRANSPARENT_OP_OBSERVER_H_
#define FSDP_TRANSPARENT_OP_OBSERVER_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_observer.h"

namespace fsdp {

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
// thread costs up to a microsecond more (//benchmarks:transparent_benchmark).
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

// Finds writes to whole parameters that no version counter shows, such as
// weight.data().clamp_(-1, 1) in a forward. Such a write would be lost in a
// copy, but kept for all ranks in shared memory. The operator fails, and the
// forward is refused as one that modifies a parameter in place.
//
// It watches the operators of each unit's first forward with grad and without,
// in training mode and out of it. A model that writes to parameters does so
// every time, and later forwards cost nothing.
class WriteWatch final : public UnitObserver, private OpListener {
 public:
  // `model` owns the new object.
  explicit WriteWatch(ShardedModel* model);
  ~WriteWatch() override;

  absl::Status BeforePreForward(int) override { return absl::OkStatus(); }
  void AfterPreForward(int unit) override;
  absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) override;
  void AfterPostForward(
      int unit,
      const std::vector<std::shared_ptr<torch::autograd::Node>>& exits)
      override;
  absl::Status BeforePreBackward(int) override { return absl::OkStatus(); }
  absl::Status BeforePostBackward(int) override { return absl::OkStatus(); }
  absl::Status BeforeEndOfBackward() override { return absl::OkStatus(); }
  void OnGivenUp() override;
  absl::Status TakeFailure() override;

 private:
  static constexpr int kModes = 4;
  struct UnitState {
    StorageTag tag;
    std::array<bool, kModes> seen = {};
  };

  void OnOperator(absl::Span<const int>, bool) override {}
  void OnWrite(const at::Tensor& tensor, int unit) override;

  ShardedModel* const model_;
  std::vector<UnitState> units_;
  int watched_ = 0;  // forwards under way
  std::optional<OpObserver> observer_;
  absl::Status failure_;
};

}  // namespace fsdp

#endif  // FSDP_TRANSPARENT_OP_OBSERVER_H_
