// One sharded model on one rank, without its C++ type: what the module wrapper,
// fsdp::Forward and autograd talk to.
#ifndef FSDP_MODEL_SHARDED_MODEL_H_
#define FSDP_MODEL_SHARDED_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/autograd/checkpoint_scope.h"
#include "fsdp/model/backward_session.h"
#include "fsdp/model/named_shard.h"
#include "fsdp/model/order_check.h"
#include "fsdp/model/unit_observer.h"
#include "fsdp/options/options.h"
#include "fsdp/precision/buffer_precision.h"
#include "fsdp/runtime/reduction_hooks.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/schedule/schedule.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace fsdp {

struct ModelView;
class OffloadSpace;

// Used by one thread at a time: the rank's. Backward may run on the engine's
// thread of a device, while that thread waits.
//
// A long class: users, autograd and whoever works between steps meet here, at
// the state of the same units. What belongs to one kind of event is in one
// file; what one of them alone remembers is in a class of its own.
class ShardedModel final : public BackwardListener,
                           public std::enable_shared_from_this<ShardedModel> {
 public:
  struct Settings {
    bool abort_on_failure = true;
    bool check_order = true;
    bool ignores_parameters = false;  // some of the modules' are in no unit
    std::vector<UnitOptions> units;
    // Units, and how, that backward runs the forward of again.
    std::vector<bool> recomputed;
    CheckpointOptions recompute_options;
    std::function<bool()> is_training;  // the mode of the root module
    BufferPrecision buffers;
    std::vector<std::vector<at::Tensor>> unit_buffers;  // the same, by unit
    // Kept for those who ask; null: all rests on the device.
    std::shared_ptr<const OffloadSpace> offload;
    bool commits_steps = false;  // OffloadOptions::keep
    // Further names of tied parameters, and the one that NamedShards() has.
    std::map<std::string, std::string, std::less<>> aliases;
    // Parameters without values (InitOptions::loaded_later).
    std::set<std::string> loaded_later;
  };

  // `runtime` and `schedule` know the same units.
  ShardedModel(std::unique_ptr<Runtime> runtime, Schedule schedule,
               Settings settings);
  ~ShardedModel() override;

  // --- Modules ------------------------------------------------------------
  // Once: every module of the model, and which unit it is, kNoUnit for none.
  // Modules may be gone before the model, and the model before they are.
  static constexpr int kNoUnit = -1;
  void SetModules(
      const std::vector<std::pair<std::shared_ptr<torch::nn::Module>, int>>&
          modules);
  // The unit that `module` is, or kNoUnit; nothing where it is not of this
  // model. In constant time.
  std::optional<int> UnitOf(const torch::nn::Module& module) const;

  // --- One forward of a unit, in this order -------------------------------
  // Gathers the unit's parameters and hands them to autograd. When that fails
  // the iteration is given up; when it is refused nothing has changed.
  absl::Status PreForward(int unit);
  // After PreForward() with grad: what a checkpointed region in the unit's
  // forward may use.
  const std::shared_ptr<const RunningUnit>& running_unit(int unit) const {
    return units_[unit].running;
  }
  // Whether CastInputs() is due.
  bool CastsInputs(int unit) const;
  void CastInputs(int unit, const std::vector<at::Tensor*>& inputs) const;
  // With grad, for each tensor that the forward gets: tells from `input` when
  // the gradient has left a unit with nothing trainable.
  void WatchInput(int unit, const at::Tensor& input);
  // Casts `outputs`, makes them announce the backward, and frees the unit.
  // `inputs`: what WatchInput() was told of. FailedPrecondition: a parameter
  // was modified in place, replaced, or is (a view of) an output.
  absl::Status PostForward(int unit, const std::vector<at::Tensor*>& outputs,
                           const SeenTensors& inputs = {});
  // The same for a use whose outputs are not known; the caller tells whether a
  // backward is to come.
  absl::Status PostForwardOfUnseen(int unit, bool expects_backward);
  // Instead of PostForward(), when the forward throws; `thrown` where that is
  // known.
  void AbandonForward(int unit, const absl::Status& thrown);

  // loss.backward() with errors as a Status, after which the model is ready for
  // the next iteration and, where Settings say so, the communicator is aborted.
  // InvalidArgument, and nothing is aborted: not a scalar that requires grad.
  absl::Status Backward(const at::Tensor& loss, bool retain_graph);

  // Whether backwards from now on reduce gradients; otherwise they are kept
  // whole and added to the next backward's that does. All ranks alike.
  void SetSynchronizes(bool synchronizes) { synchronizes_ = synchronizes; }
  bool synchronizes() const { return synchronizes_; }
  // The same of one unit, in backwards that reduce; and whether what is reduced
  // within the group of shards is reduced over replicas, too, or kept for the
  // next backward of the unit that is. All ranks alike. FailedPrecondition
  // inside a forward or backward.
  absl::Status SetUnitSynchronizes(int unit, bool synchronizes);
  absl::Status SetUnitAllReduces(int unit, bool all_reduces);

  // Drops the shards' gradients, or makes them zero, and drops gradients kept
  // whole.
  void ZeroGrad(bool set_to_none);
  // What the module's own tensors leave to the shards; see ParameterOwner.
  ParameterOwner& parameter_owner() const { return *owner_; }

  // Called in backward with the shards of each unit as soon as their gradients
  // are complete. It steps them and drops the gradients, whose memory is then
  // given back: gradients of a unit or two are alive at a time. While it runs,
  // no other shard has a gradient. Replaces what was set before; null ends it.
  // FailedPrecondition inside a forward or backward, or with
  // OffloadOptions::keep.
  using UnitStep = std::function<absl::Status(absl::Span<const NamedShard>)>;
  absl::Status StepInBackward(UnitStep step);
  // Reductions from now on. FailedPrecondition inside a forward or backward, or
  // when there are hooks already.
  absl::Status SetReductionHooks(ReduceScatterHook reduce_scatter,
                                 AllReduceHook all_reduce);
  // Gradients are divided by `before` reductions and by `after` them.
  // InvalidArgument: not positive. FailedPrecondition inside a forward or
  // backward.
  absl::Status SetGradientDivideFactors(double before, double after);

  // --- Observing (unit_observer.h) ----------------------------------------
  // At most once, before the first forward.
  void SetObserver(std::unique_ptr<UnitObserver> observer);
  // See UnitObserver; OK without one.
  absl::Status TakeFailure();
  // Whether a backward under way has announced itself.
  bool in_backward() const { return backward_.is_under_way(); }
  // The node of the unit's forward under way; null without grad, or where
  // nothing is trainable.
  const std::shared_ptr<torch::autograd::Node>& forward_node(int unit) const {
    return units_[unit].node;
  }

  // Of an operator of a forward that is about to write to `target`, which looks
  // into the unit's unsharded memory: FailedPrecondition, naming the parameter.
  // The memory is taken away, so that the operator fails.
  absl::Status RefuseWrite(int unit, const at::Tensor& target);
  // Whether the root module is in training mode.
  bool is_training() const {
    return !settings_.is_training || settings_.is_training();
  }

  // --- Shards -------------------------------------------------------------
  const std::vector<NamedShard>& NamedShards() const { return named_shards_; }
  // Freezes or unfreezes a parameter from the next forward on, by any of its
  // names; all ranks alike.
  // NotFound for an unknown name. InvalidArgument for bytes, which have no
  // gradient. FailedPrecondition inside a forward, a
  // backward or a scope of full parameters.
  absl::Status SetTrainable(absl::string_view name, bool trainable);
  // Between these, forward and backward are refused with a text that names
  // `what`, nothing is gathered, and the module's tensors have no edges of
  // ours: they are free for a scope that makes them whole. FailedPrecondition
  // inside a forward, a backward or another such scope.
  // `reads_values`: and what CheckLoaded() refuses.
  absl::Status BeginWholeAccess(absl::string_view what,
                                bool reads_values = false);
  void EndWholeAccess();

  // FailedPrecondition, naming one, while parameters that the program said it
  // would load (InitOptions::loaded_later) have no values here.
  absl::Status CheckLoaded();
  // FailedPrecondition, naming the parameter, where the data of one of the
  // module's tensors or of a shard was replaced.
  absl::Status CheckBinding() const;

  // Gathers ahead of use, waits for that, and frees. See Schedule.
  absl::Status Unshard(int unit);
  absl::Status WaitUnshard(int unit);
  absl::Status Reshard(int unit);

  // --- What it is made of ---------------------------------------------------
  // model_view.h has more, to be read.
  const BufferPrecision& buffers() const { return settings_.buffers; }

  int num_units() const { return runtime_->num_units(); }
  const std::string& unit_name(int unit) const { return runtime_->name(unit); }
  // The unit's flat parameters; none for a root that owns nothing.
  absl::Span<const std::unique_ptr<flat_param::FlatParameter>> flats(
      int unit) const {
    return runtime_->flats(unit);
  }
  // The ranks that the unit is sharded over, and those that have the same shard
  // of it; null: no others have.
  comm::Communicator& shard_group(int unit) const {
    return *runtime_->placement(unit).shard;
  }
  comm::Communicator* replica_group(int unit) const {
    return runtime_->placement(unit).replicate.get();
  }
  const UnitOptions& unit_options(int unit) const {
    return settings_.units[unit];
  }
  bool recomputes(int unit) const { return settings_.recomputed[unit]; }
  const CheckpointOptions& recompute_options() const {
    return settings_.recompute_options;
  }
  // Null without Options::offload.
  const OffloadSpace* offload() const { return settings_.offload.get(); }
  MemoryStats memory_stats() const { return runtime_->memory_stats(); }
  // Of all ranks.
  comm::Communicator& communicator() const { return runtime_->communicator(); }
  // Of each wait for other ranks.
  absl::Duration timeout() const { return runtime_->timeout(); }
  // Of shards and all that is gathered.
  c10::Device device() const { return runtime_->device(); }
  // Ends the operations of this rank's groups and tells their ranks: for calls
  // of others that these may wait in.
  void Abort(const absl::Status& reason) const { runtime_->Abort(reason); }

  // --- BackwardListener ---------------------------------------------------
  void OnPreBackward(const PreBackwardInfo& info) override;
  void OnPostBackward(const PostBackwardInfo& info,
                      std::vector<at::Tensor> gradients) override;
  void OnLeft(uint64_t start_sequence) override;

 private:
  // They offer more of a model to one user each.
  friend class ModelCapture;
  friend ModelView ViewOf(const ShardedModel& model);

  // One distinct parameter of a unit: slot k of the unit's node.
  struct Slot {
    // Of the tensors; tied ones may differ in this.
    bool AnyTrainable() const;

    std::string name;
    std::vector<at::Tensor> tensors;  // of the module
    at::Tensor shard;
    std::shared_ptr<torch::autograd::Node> sentinel;
    // Of the tensors, when last seen: they are not written but by their shards.
    uint32_t version = 0;
    uint32_t shard_version = 0;  // of the shard, when last seen
  };
  struct UnitState {
    std::vector<Slot> slots;
    int num_trainable = 0;  // as of the last PreForward
    bool edges_attached = false;
    size_t first_shard = 0;  // in named_shards_
    // Of the shards when the user has asked for the unit.
    std::vector<uint32_t> versions_asked_for;
    std::shared_ptr<const std::vector<at::Tensor>> buffers;
    // Of the forward that runs now; null without grad.
    uint64_t start_sequence = 0;
    std::shared_ptr<torch::autograd::Node> node;
    std::shared_ptr<const RunningUnit> running;
  };
  static constexpr int kRoot = 0;

  // sharded_model.cc
  absl::Status CheckNoWholeAccess() const;
  absl::Status CheckIdle(absl::string_view what) const;
  // Reports `event` to the schedule and carries out what it asks for; where
  // that fails the iteration is given up.
  absl::Status TransitionOrGiveUp(const Event& event,
                                  const std::vector<at::Tensor>& gradients);
  void NotePhase(const Event& event);
  // What becomes of the reductions in flight. Waiting for them is too late once
  // the user may have had the gradients.
  enum class InFlight { kFinish, kDrop };
  void GiveUpIteration(const absl::Status& reason,
                       InFlight reductions = InFlight::kFinish);
  void GiveUpStaleBackward();
  // Frees all units, outside forward and backward.
  absl::Status ReleaseUnsharded();
  void AttachSentinels();
  void RestoreSentinels();
  void ClearEdges();

  // sharded_model_forward.cc
  absl::Status CheckMayBegin(int unit) const;
  absl::Status BeginForward(int unit, bool recomputes);
  absl::Status CheckParameters(int unit, bool records_graph);
  absl::Status CheckHooks(int unit) const;
  void AttachToAutograd(int unit, bool records_graph);
  void AttachNode(int unit);
  bool HasTrainable(int unit) const;
  absl::Status CheckForwardLeftParametersAlone(
      int unit, const std::vector<at::Tensor*>& outputs) const;
  absl::Status BeforePostForward(int unit,
                                 const std::vector<at::Tensor*>& outputs);
  using Nodes = std::vector<std::shared_ptr<torch::autograd::Node>>;
  absl::Status EndForward(int unit, bool expects_backward, const Nodes& exits);

  // sharded_model_backward.cc
  void EnterBackward();
  void OnEndOfBackward();
  void OnBackwardLost();
  absl::Status FinishPendingFrom(uint64_t sequence);
  void RunParameterHooks(int unit, std::vector<at::Tensor>& gradients);
  absl::Status PostBackward(int unit, const std::vector<at::Tensor>& gradients,
                            bool reduces);
  bool ReducesAll() const;
  void NoteGradients();
  void NoteEndOfStep();
  absl::Status CheckOrder();

  // sharded_model_versions.cc
  void SeeVersions();
  bool NoteWrittenShards(int unit);
  void NoteWritesBeforeBackward();
  absl::Status ExplainStaleGraph(absl::Status status) const;
  std::vector<uint32_t> ShardVersions(int unit) const;
  absl::Status CheckHeldIsCurrent(int unit) const;
  absl::Status CheckUnwrittenBetweenForwards(int unit) const;
  absl::Status Modified(int unit, const Slot& slot) const;

  // sharded_model_precision.cc
  absl::Status ChoosePrecision();
  bool InFullPrecision(int unit) const;
  void CastOutputs(int unit, const std::vector<at::Tensor*>& outputs) const;
  absl::Status CheckPrecisionOf(const PreBackwardInfo& info) const;

  // sharded_model_between_steps.cc
  absl::Status SetReduction(int unit, bool synchronizes, bool all_reduces);

  const std::unique_ptr<Runtime> runtime_;
  Schedule schedule_;
  Settings settings_;
  const std::shared_ptr<comm::RankActivity> activity_;  // null: nobody asks
  const std::shared_ptr<ParameterOwner> owner_;
  std::vector<UnitState> units_;
  std::vector<NamedShard> named_shards_;
  struct ModulePlace {
    std::weak_ptr<torch::nn::Module> module;
    int unit;
  };
  std::unordered_map<const torch::nn::Module*, ModulePlace> modules_;
  bool captures_ = false;  // a step: nothing that is done is sent
  BackwardSession backward_;
  OrderCheck order_check_;
  std::string whole_access_;  // what has the parameters whole; empty: nothing
  // A unit whose shards were written since a graph has computed with them.
  std::string written_before_backward_;
  bool synchronizes_ = true;
  bool full_precision_ = false;  // where a unit's policy says so of eval mode
  // Its changes, each with the sequence number that autograd was at.
  std::vector<std::pair<uint64_t, bool>> precisions_;
  bool has_reduced_ = false;            // a backward has, in the step under way
  int steps_ended_ = 0;                 // no more than are looked at
  std::vector<bool> has_had_gradient_;  // of named_shards_
  std::thread::id forward_thread_;
  std::unique_ptr<UnitObserver> observer_;  // may be null
};

}  // namespace fsdp

#endif  // FSDP_MODEL_SHARDED_MODEL_H_
