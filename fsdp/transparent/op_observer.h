// Sees LibTorch's operators before they run.
//
// at::RecordFunction, the mechanism of profilers, calls back at the start of
// every operator that the dispatcher runs, those inside other operators and
// those of backward included, and before the operator's autograd kernel looks
// at its inputs.
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

// Finds writes to unsharded parameters that no version counter tells of, such
// as weight.data().clamp_(-1, 1) in a forward. What becomes of them would
// depend on where unsharded parameters lie: lost with a copy, kept for all
// ranks where memory is shared.

// Watches the operators of each unit's first forward with grad and without, in
// training mode and out of it: a model that writes to parameters does it every
// time, and later forwards cost nothing. The operator fails, and the forward is
// refused as one that modifies a parameter in place.
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

  int Mode() const;
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
