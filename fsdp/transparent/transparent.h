// Units without fsdp::Forward: the operators that run tell when a unit of an
// unmodified model begins and ends its forward and its backward.
//
// While a forward of the root is under way, the first operator that takes a
// unit's parameter, or a view of one, begins the unit's forward: the unit is
// gathered and gets a new Unit node before the operator looks at the parameter.
// The forward ends when an operator takes a parameter of a unit that is not
// inside this one, or with the forward around it. What comes later is a new
// use, with its own gather, node and reduction.
//
// Nothing tells a unit's output from other tensors, so there are no exits:
// backward gathers a unit when an operator takes its parameter, or never if
// none does. Its Unit node ends the backward; the backward of a unit with
// nothing trainable ends as its forward does.
#ifndef FSDP_TRANSPARENT_TRANSPARENT_H_
#define FSDP_TRANSPARENT_TRANSPARENT_H_

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "fsdp/autograd/checkpoint_scope.h"
#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_observer.h"
#include "fsdp/transparent/op_observer.h"

namespace fsdp {

// Adds the events of one model's transparent uses to those that fsdp::Forward
// and autograd report. Errors cannot leave an operator's callback, so the next
// event or TakeFailure() returns them. An operator that needs memory that is
// not there fails itself.
class TransparentUnits final : public UnitObserver, private OpListener {
 public:
  // `model` owns the new object. parents[i] is the unit around unit i, -1 for
  // the root's.
  TransparentUnits(ShardedModel* model, std::vector<int> parents);
  ~TransparentUnits() override;

  absl::Status BeforePreForward(int unit) override;
  void AfterPreForward(int unit) override;
  absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) override;
  void AfterPostForward(
      int unit,
      const std::vector<std::shared_ptr<torch::autograd::Node>>& exits)
      override;
  absl::Status BeforePreBackward(int unit) override;
  absl::Status BeforePostBackward(int unit) override;
  absl::Status BeforeEndOfBackward() override;
  void OnGivenUp() override;
  absl::Status TakeFailure() override;

 private:
  using Node = torch::autograd::Node;
  struct OpenForward {
    int unit;
    bool is_transparent;
    bool expects_backward;  // a transparent one's, by its graph
  };
  struct UnitState {
    StorageTag tag;
    int forwards = 0;          // entries of stack_
    bool in_backward = false;  // between PreBackward and PostBackward
    bool is_frozen = false;    // in its last transparent use with a graph
    // Nodes of transparent uses whose graph lives, the oldest first.
    std::vector<std::weak_ptr<Node>> nodes;
    // A frozen unit was used in this iteration, and then read by backward in
    // this one and in the one before.
    bool used = false;
    bool read_by_backward = false;
    bool was_read_by_backward = true;
  };
  // While one lives, events are ours and operators are the library's own.
  class Acting {
   public:
    explicit Acting(TransparentUnits* owner)
        : owner_(owner), before_(std::exchange(owner->acting_, true)) {}
    Acting(const Acting&) = delete;
    Acting& operator=(const Acting&) = delete;
    ~Acting() { owner_->acting_ = before_; }

   private:
    TransparentUnits* const owner_;
    const bool before_;
    const at::DisableRecordFunctionGuard unobserved_;
  };

  void OnOperator(absl::Span<const int> units, bool nested) override;
  void OnWrite(const at::Tensor& tensor, int unit) override;
  absl::Status CheckThread(int unit) const;
  absl::Status OnForwardOperator(absl::Span<const int> units, bool nested);
  absl::Status OnBackwardOperator(absl::Span<const int> units, bool nested);

  absl::Status Begin();
  void ObserveAsLongAsNeeded();
  bool IsAncestor(int ancestor, int unit) const;
  bool IsAround(int unit, absl::Span<const int> inner_units) const;

  absl::Status OpenUnit(int unit);
  absl::Status CloseInnermost();
  absl::Status CloseUnlessAround(absl::Span<const int> units);
  void EnterRecomputation();

  absl::Status BeginBackward(int unit);
  void ForgetBackward();
  absl::Status EndFrozenUnlessRelatedTo(absl::Span<const int> units);
  absl::Status CheckNotCaptured() const;

  void Fail(const absl::Status& status);
  absl::Status Failure() const;

  ShardedModel* const model_;
  const std::vector<int> parents_;
  std::vector<UnitState> units_;
  std::vector<OpenForward> stack_;  // forwards under way, the innermost last
  // The recomputation under way in which units have run, and how many forwards
  // of stack_ are around it.
  const RecomputeScope* recomputation_ = nullptr;
  size_t outer_forwards_ = 0;
  std::vector<int>
      frozen_;  // frozen units whose backward an operator has begun
  // Exits of root forwards for which a backward may still come.
  std::vector<std::weak_ptr<Node>> graphs_;
  std::optional<OpObserver> observer_;
  bool acting_ = false;                  // the present event is ours
  bool records_graph_ = false;           // of the outermost forward
  std::thread::id thread_;               // of the outermost forward
  std::atomic<bool> in_forward_{false};  // stack_ is not empty
  mutable absl::Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace fsdp

#endif  // FSDP_TRANSPARENT_TRANSPARENT_H_
