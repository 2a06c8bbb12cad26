// A unit's parameters as its module has them, beside their shards: where
// autograd finds them, who has written them, which nobody has used, and whose
// they are.
#ifndef FSDP_MODEL_UNIT_PARAMETERS_H_
#define FSDP_MODEL_UNIT_PARAMETERS_H_

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/autograd_node.h"
#include "fsdp/autograd/autograd.h"
#include "ranges/tensor_range.h"

namespace fsdp {

class ShardedModel;

// The module's tensors hold values only while the unit computes, so writes to
// them are refused, and only their shards write them. Between steps a trainable
// tensor has an edge to a sentinel, which refuses gradients. Not thread-safe.
class UnitParameters {
 public:
  // One distinct parameter: slot k of the unit's node.
  struct Slot {
    // Tied tensors may differ in whether they are trainable.
    bool AnyTrainable() const;
    // Counts writes to the tensors: tied ones count apart.
    uint32_t Version() const;

    std::string name;
    std::vector<at::Tensor> tensors;  // of the module
    at::Tensor shard;
    NodePtr sentinel;
    uint32_t version = 0;        // Version() when last seen
    uint32_t shard_version = 0;  // the shard's when last seen
  };

  // `unit` names the unit in errors.
  explicit UnitParameters(std::string unit) : unit_(std::move(unit)) {}

  void Add(std::string name, std::vector<at::Tensor> tensors,
           const at::Tensor& shard);
  const std::vector<Slot>& slots() const { return slots_; }

  // --- Autograd -------------------------------------------------------------
  bool AnyTrainable() const;
  // Makes shards require grad as the tensors do, which must have no edges, and
  // points the tensors to sentinels.
  void AttachSentinels();
  // Does the second alone, after a forward has pointed tensors elsewhere.
  void RestoreSentinels() const;
  void ClearEdges() const;
  // Returns the tensors that the user trains at present, by slot, without
  // edges, and makes shards require grad as they do. Users may change it
  // between forwards.
  ParameterSlots TakeTrainable();
  // InvalidArgument: bytes, which have no gradient.
  absl::Status SetTrainable(size_t slot, bool trainable);
  // FailedPrecondition names a hook that would never run, so that gradients
  // would be wrong silently.
  absl::Status CheckHooks() const;

  // --- Writes ---------------------------------------------------------------
  // Accepts all writes to the module's tensors so far.
  void SeeVersions();
  // Lets autograd know of writes to shards since the last call: the tensors
  // count as written. Returns whether there were any.
  bool NoteWrittenShards();
  std::vector<uint32_t> ShardVersions() const;
  // FailedPrecondition: a tensor was written between forwards, which the unit's
  // next use would lose, or during the unit's forward.
  absl::Status CheckUnwrittenBetweenForwards() const;
  absl::Status CheckUnwrittenInForward() const;
  // Returns the error for a write to the tensors of a slot.
  absl::Status Modified(const Slot& slot) const;

 private:
  const std::string unit_;
  std::vector<Slot> slots_;
};

// Finds parameters that no rank has used in the first steps of a training.
class UnusedParameters {
 public:
  // Two optimizers of one model may take turns.
  static constexpr int kStepsLookedAt = 2;

  // Returns whether the steps that are looked at have ended.
  bool is_over() const { return steps_ended_ == kStepsLookedAt; }
  // Notes which of `shards`, the same at every call, have a gradient. Call it
  // after a backward that has reduced all gradients. Does nothing if is_over().
  void NoteGradients(absl::Span<const TensorRange> shards);
  // Call it before the next forward or backward: a step has ended once the
  // gradients of a backward are dropped. Returns the trainable parameters that
  // had no gradient in the first kStepsLookedAt steps, at the end of the last.
  std::vector<std::string> NoteEndOfStep(absl::Span<const TensorRange> shards);

 private:
  bool has_reduced_ = false;            // a backward of the step under way has
  int steps_ended_ = 0;                 // at most as many as are looked at
  std::vector<bool> has_had_gradient_;  // of the shards
};

// Says whose a module's parameters are, and that their gradients are elsewhere.
// All parameters of a model share one, which may outlive the model. It hangs on
// the tensor's autograd metadata, which stays when the tensor's data is
// replaced. Thread-safe once the model is set.
class ParameterOwner {
 public:
  void set_model(std::weak_ptr<ShardedModel> model) {
    model_ = std::move(model);
  }
  // Returns null if the model is gone.
  std::shared_ptr<ShardedModel> model() const { return model_.lock(); }

  // Between these calls the parameters' own gradients can be used as those of
  // any tensor. Calls may be nested.
  void OpenGradients() { ++opened_; }
  void CloseGradients() { --opened_; }
  bool gradients_are_open() const { return opened_ > 0; }

 private:
  std::weak_ptr<ShardedModel> model_;
  std::atomic<int> opened_{0};
};

// Gives `parameter`, a tensor of a module, to `owner`. Its grad() and
// mutable_grad() then throw StatusError (FailedPrecondition), which says where
// the gradient of `name` is, unless gradients are open or the parameter is
// frozen. Nothing else about it changes.
void SetOwner(const at::Tensor& parameter, const std::string& name,
              std::shared_ptr<const ParameterOwner> owner);

// Returns null if no model owns `parameter`. Costs a few nanoseconds.
const ParameterOwner* OwnerOf(const at::Tensor& parameter);

}  // namespace fsdp

#endif  // FSDP_MODEL_UNIT_PARAMETERS_H_
