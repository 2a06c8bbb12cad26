// One sharded model on one rank, without its C++ type. The module wrapper,
// fsdp::Forward and autograd use it.
#ifndef FSDP_MODEL_SHARDED_MODEL_H_
#define FSDP_MODEL_SHARDED_MODEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
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

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/autograd_node.h"
#include "comm/communicator.h"
#include "comm/rank_activity.h"
#include "flat_param/flat_parameter.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/model/precision_switch.h"
#include "fsdp/model/unit_parameters.h"
#include "fsdp/options/options.h"
#include "fsdp/runtime/reduction_hooks.h"
#include "fsdp/runtime/runtime.h"
#include "fsdp/runtime/runtime_common.h"
#include "fsdp/schedule/schedule.h"
#include "ranges/tensor_range.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace fsdp {

class OffloadSpace;

// The state of a backward, from its first event until it is over, has failed or
// is given up. Serves all of a model, of which one at a time is under way;
// backwards nested in it are a part of it. It decides nothing about units. Used
// by the thread that reports the events.
class BackwardSession {
 public:
  // Returns whether a backward has begun here and the engine still runs it.
  bool is_under_way() const { return !under_way_.expired(); }
  // Call it at the first event of an outermost backward. The engine calls
  // `on_end` when that is over; what it throws ends the backward. Instead it
  // calls `on_lost`, ignoring what that throws, if `on_end` has thrown or if it
  // drops a backward that threw, perhaps on its own thread. Both may be called
  // after this object is gone.
  void Begin(std::function<void()> on_end, std::function<void()> on_lost);
  // Call it first in `on_end`: no backward is under way any more.
  void Leave() { under_way_.reset(); }
  // Call it at the end, and when the backward is given up.
  void Forget();

  // --- Units that are reached and not left ---------------------------------
  // Notes that the gradient has reached the outputs of a forward of `unit`,
  // which began at `start_sequence` of autograd.
  void AddPending(int unit, uint64_t start_sequence, bool has_unit_node);
  // Notes that the gradient has reached the unit's own node.
  void RemovePending(int unit, uint64_t start_sequence);
  struct Finished {
    int unit;
    bool reduces;  // other ranks may have gradients of it
  };
  // Removes and returns the innermost pending unit whose forward began at
  // `sequence` or later, of the running backward or of one nested in it that is
  // over; nullopt if there is none.
  std::optional<Finished> TakePendingFrom(uint64_t sequence);

  // FailedPrecondition names `unit`: the running backward's forwards were
  // recorded on another thread than `thread`. Autograd and this object order
  // nodes by sequence numbers, which count per thread.
  absl::Status CheckForwardThread(const std::string& unit,
                                  std::optional<uint64_t> thread);

  // Returns whether the user's hooks on a parameter of a unit have run.
  bool hooks_have_run(int unit, size_t parameter) const {
    return hooks_have_run_.contains({unit, parameter});
  }
  void NoteHooks(int unit, size_t parameter) {
    hooks_have_run_.insert({unit, parameter});
  }

 private:
  // A unit whose outputs the gradient has reached, but not its own node.
  struct Pending {
    int unit;
    int graph_task;  // a nested backward's is higher than the one's around it
    uint64_t start_sequence;
    bool has_unit_node;
  };

  // Lives as long as the outermost backward under way, however that ends.
  struct UnderWay;
  std::weak_ptr<UnderWay> under_way_;
  std::vector<Pending> pending_;
  // The thread that recorded the forwards of each backward that is under way.
  std::map<int, uint64_t> forward_threads_;
  absl::flat_hash_set<std::pair<int, size_t>> hooks_have_run_;
};

// Finds ranks whose collectives do not match, which not every backend can.
// Every reducing backward compares sixteen bytes, because a rank whose order
// has not changed does not know about the others'.
class OrderCheck {
 public:
  // With `lags` the host, which only queues what a device does, does not wait
  // for other hosts here either, and hears of a difference one backward later.
  // `communicator` is of all ranks and must outlive this object.
  OrderCheck(comm::Communicator& communicator, absl::Duration timeout,
             bool lags)
      : communicator_(communicator), timeout_(timeout), lags_(lags) {}

  // Compares the collectives of one backward. Collective. InvalidArgument, on
  // all ranks, names the first difference between two of them.
  absl::Status Compare(OrderLog order);
  // Waits for the comparison that is under way, if any. Collective.
  absl::Status Finish();
  // Drops the comparison without waiting.
  void Drop() { under_way_.reset(); }

 private:
  struct Comparison {
    OrderLog order;
    at::Tensor extremes;
    std::unique_ptr<comm::Work> work;
  };

  absl::Status Finish(Comparison& comparison);

  comm::Communicator& communicator_;
  const absl::Duration timeout_;
  const bool lags_;
  std::unique_ptr<Comparison> under_way_;  // the last backward's, or null
};

// Adds events of units to those that fsdp::Forward and autograd report. Called
// at each event, on the thread that reports it, also for events that it adds
// itself. An error ends the event as the event's own errors do.
class UnitObserver {
 public:
  virtual ~UnitObserver() = default;

  virtual absl::Status BeforePreForward(int) { return absl::OkStatus(); }
  // Called only if the event has succeeded.
  virtual void AfterPreForward(int unit) = 0;
  virtual absl::Status BeforePostForward(
      int unit, const std::vector<at::Tensor*>& outputs) = 0;
  // `exits` are the nodes by which a backward enters what the forward recorded.
  virtual void AfterPostForward(int unit,
                                const std::vector<NodePtr>& exits) = 0;
  virtual absl::Status BeforePreBackward(int) { return absl::OkStatus(); }
  virtual absl::Status BeforePostBackward(int) { return absl::OkStatus(); }
  virtual absl::Status BeforeEndOfBackward() { return absl::OkStatus(); }
  // Forward and backward are over for all units.
  virtual void OnGivenUp() = 0;

  // Returns an error that could not be thrown where it was found, once.
  virtual absl::Status TakeFailure() = 0;
};

// Used by one thread at a time, the rank's. Backward may run on the engine's
// thread of a device while that thread waits.
//
// The class is long because users, autograd and callers between steps share the
// state of the same units. State that only one of them needs has a class of its
// own.
class ShardedModel final : public BackwardListener,
                           public std::enable_shared_from_this<ShardedModel> {
 public:
  struct Settings {
    bool abort_on_failure = true;
    bool check_order = true;
    bool ignores_parameters = false;  // some of the modules' are in no unit
    // By unit.
    std::vector<ShardingStrategy> strategies;
    std::vector<MixedPrecision> precisions;
    // Has true for each unit whose forward backward runs again.
    std::vector<bool> recomputed;
    CheckpointOptions recompute_options;
    std::function<bool()> is_training;  // the mode of the root module
    std::vector<CastBuffer> buffers;
    // Kept for those who ask; null: everything rests on the device.
    std::shared_ptr<const OffloadSpace> offload;
    bool commits_steps = false;  // OffloadOptions::keep
    // Maps further names of tied parameters to the one that Ranges() has.
    std::map<std::string, std::string, std::less<>> aliases;
    // Parameters without values (InitOptions::loaded_later).
    std::set<std::string> loaded_later;
  };

  // `runtime` and `schedule` must know the same units.
  ShardedModel(std::unique_ptr<Runtime> runtime, Schedule schedule,
               Settings settings);
  ~ShardedModel() override;

  // --- Modules ------------------------------------------------------------
  // Sets every module of the model, and the unit that each is, kNoUnit for
  // none. Call it once. Modules may be gone before the model, and the model
  // before them.
  static constexpr int kNoUnit = -1;
  void SetModules(
      const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
      const std::vector<int>& units);
  // Returns the unit that `module` is, or kNoUnit; nothing if it is not of this
  // model. Constant time.
  std::optional<int> UnitOf(const torch::nn::Module& module) const;

  // --- One forward of a unit, in this order -------------------------------
  // Gathers the unit's parameters and hands them to autograd. If that fails,
  // the iteration is given up; if it is refused, nothing has changed.
  absl::Status PreForward(int unit);
  // Tells a checkpointed region in the unit's forward what it may use. Call it
  // after a PreForward() with grad.
  const std::shared_ptr<const RunningUnit>& running_unit(int unit) const {
    return units_[unit].running;
  }
  // Says which precision units run in; its CastInputs() comes after
  // PreForward().
  const PrecisionSwitch& precision() const { return precision_; }
  // Call it with grad, for each tensor that the forward gets: `input` tells
  // when the gradient has left a unit with nothing trainable.
  void WatchInput(int unit, const at::Tensor& input);
  // Casts `outputs`, makes them announce the backward, and frees the unit.
  // `inputs` are those that WatchInput() got. FailedPrecondition: a parameter
  // was modified in place or replaced, or is (a view of) an output.
  absl::Status PostForward(int unit, const std::vector<at::Tensor*>& outputs,
                           const SeenTensors& inputs = {});
  // The same for a use whose outputs are not known; the caller tells whether a
  // backward will come.
  absl::Status PostForwardOfUnseen(int unit, bool expects_backward);
  // Call it instead of PostForward() when the forward throws; `thrown` says
  // what, if that is known.
  void AbandonForward(int unit, const absl::Status& thrown);

  // As ShardedModuleBase (fully_sharded_data_parallel.h) has it.
  absl::Status Backward(const at::Tensor& loss, bool retain_graph);

  // Says whether later backwards reduce gradients, or keep them whole for the
  // next one that does. The same on all ranks.
  void SetSynchronizes(bool synchronizes) { synchronizes_ = synchronizes; }
  bool synchronizes() const { return synchronizes_; }
  // Says so for one unit, in backwards that reduce, and whether sums within the
  // group of shards are also reduced over replicas, or kept for the unit's next
  // backward that does so; unset: as before. The same on all ranks.
  // FailedPrecondition inside a forward or backward.
  absl::Status SetReduction(int unit, std::optional<bool> synchronizes,
                            std::optional<bool> all_reduces);

  // Drops the shards' gradients, or makes them zero, and drops gradients that
  // are kept whole.
  void ZeroGrad(bool set_to_none);
  // The module's tensors leave gradients to the shards; see ParameterOwner.
  ParameterOwner& parameter_owner() const { return *owner_; }

  // These do what ShardedModuleBase says of its methods of the same names.
  using UnitStep = std::function<absl::Status(absl::Span<const TensorRange>)>;
  absl::Status StepInBackward(UnitStep step);
  absl::Status SetReductionHooks(ReduceScatterHook reduce_scatter,
                                 AllReduceHook all_reduce);
  absl::Status SetGradientDivideFactors(double before, double after);

  // Call it at most once, before the first forward.
  void SetObserver(std::unique_ptr<UnitObserver> observer) {
    observer_ = std::move(observer);
  }
  // See UnitObserver; OK without an observer.
  absl::Status TakeFailure() {
    return observer_ == nullptr ? absl::OkStatus() : observer_->TakeFailure();
  }
  // Returns whether a backward that is under way has announced itself.
  bool in_backward() const { return backward_.is_under_way(); }
  // Returns the node of the unit's forward that is under way; null without
  // grad, or if nothing is trainable.
  const NodePtr& forward_node(int unit) const { return units_[unit].node; }

  // Refuses a forward's operator that is about to write to `target`, which
  // looks into whole parameters of the unit, by taking their memory away.
  // FailedPrecondition names the parameter.
  absl::Status RefuseWrite(int unit, const at::Tensor& target);
  // --- Shards -------------------------------------------------------------
  const std::vector<TensorRange>& Ranges() const { return ranges_; }
  // As ShardedModuleBase (fully_sharded_data_parallel.h) has it; `name` is any
  // of the parameter's, and freezing drops its gradient.
  absl::Status SetTrainable(absl::string_view name, bool trainable);
  // Between these calls a scope makes the module's tensors whole: forward and
  // backward are refused with a text that names `what`, nothing is gathered,
  // and the tensors have no edges of ours. FailedPrecondition inside a forward,
  // a backward or another such scope, and, with `reads_values`, for what
  // CheckLoaded() refuses.
  absl::Status BeginWholeAccess(absl::string_view what,
                                bool reads_values = false);
  void EndWholeAccess();

  // FailedPrecondition names a parameter without values here that the program
  // said it would load (InitOptions::loaded_later).
  absl::Status CheckLoaded();
  // FailedPrecondition names a parameter one of whose tensors, or whose shard,
  // had its data replaced.
  absl::Status CheckBinding() const;

  // Gather ahead of use, wait for that, and free. See Schedule.
  absl::Status Unshard(int unit) { return Request(EventKind::kUnshard, unit); }
  absl::Status WaitUnshard(int unit) {
    return Request(EventKind::kWaitUnshard, unit);
  }
  absl::Status Reshard(int unit) { return Request(EventKind::kReshard, unit); }

  // --- What it is made of ---------------------------------------------------
  const Runtime& runtime() const { return *runtime_; }
  const Schedule& schedule() const { return schedule_; }
  int num_units() const { return runtime_->num_units(); }
  const std::string& unit_name(int unit) const { return runtime_->name(unit); }
  // Returns the unit around it; -1 for the root.
  int parent(int unit) const { return schedule_.units()[unit].parent; }
  // Returns the unit's flat parameters; none for a root that owns nothing.
  absl::Span<const RuntimeFlat> flats(int unit) const {
    return runtime_->flats(unit);
  }
  // The ranks that the unit is sharded over, and those with the same shard of
  // it; null: no others.
  comm::Communicator& shard_group(int unit) const {
    return *runtime_->placement(unit).shard;
  }
  comm::Communicator* replica_group(int unit) const {
    return runtime_->placement(unit).replicate.get();
  }
  ShardingStrategy strategy(int unit) const {
    return settings_.strategies[unit];
  }
  bool recomputes(int unit) const { return settings_.recomputed[unit]; }
  const CheckpointOptions& recompute_options() const {
    return settings_.recompute_options;
  }
  // Null without Options::offload.
  const OffloadSpace* offload() const { return settings_.offload.get(); }
  MemoryStats memory_stats() const { return runtime_->memory_stats(); }
  // The group of all ranks.
  comm::Communicator& communicator() const { return runtime_->communicator(); }
  // Limits each wait for other ranks.
  absl::Duration timeout() const { return runtime_->timeout(); }
  // Shards and all that is gathered lie here.
  c10::Device device() const { return runtime_->device(); }
  // Ends the operations of this rank's groups and tells their ranks, because
  // calls of others may wait in them.
  void Abort(const absl::Status& reason) const { runtime_->Abort(reason); }

  // --- BackwardListener ---------------------------------------------------
  void OnPreBackward(const PreBackwardInfo& info) override;
  void OnPostBackward(const PostBackwardInfo& info,
                      std::vector<at::Tensor> gradients) override;
  void OnLeft(uint64_t start_sequence) override;

 private:
  friend class CapturedStep;

  struct UnitState {
    explicit UnitState(const std::string& name) : parameters(name) {}

    UnitParameters parameters;
    int num_trainable = 0;  // as of the last PreForward
    bool edges_attached = false;
    size_t first_shard = 0;  // in ranges_
    // The shards' versions when the user asked for the unit.
    std::vector<uint32_t> versions_asked_for;
    std::shared_ptr<const std::vector<at::Tensor>> buffers;
    // Its shards were written since a backward that has left it gathered.
    bool written_while_kept = false;
    // These are of the forward that runs; null without grad.
    uint64_t start_sequence = 0;
    NodePtr node;
    std::shared_ptr<const RunningUnit> running;
  };
  static constexpr int kRoot = 0;

  // sharded_model.cc
  absl::Status Request(EventKind kind, int unit);
  absl::Status CheckNoWholeAccess() const;
  absl::Status CheckIdle(absl::string_view what) const;
  // Reports `event` to the schedule and carries out what it asks for. If that
  // fails, the iteration is given up.
  absl::Status TransitionOrGiveUp(const Event& event,
                                  const std::vector<at::Tensor>& gradients);
  void NotePhase(const Event& event);
  // Says what happens to reductions in flight. It is too late to wait for them
  // once the user may have had the gradients.
  enum class InFlight { kFinish, kDrop };
  void GiveUpIteration(const absl::Status& reason,
                       InFlight reductions = InFlight::kFinish);
  void GiveUpStaleBackward();
  // Frees all units, outside forward and backward.
  absl::Status ReleaseUnsharded();
  void RestoreSentinels();
  // Does this for all units; see UnitParameters.
  void SeeVersions();

  // sharded_model_forward.cc
  absl::Status BeginForward(int unit, bool recomputes);
  bool NoteWrittenShards(int unit);
  absl::Status CheckParameters(int unit, bool records_graph);
  void AttachNode(int unit);
  absl::Status CheckHeldIsCurrent(int unit) const;
  absl::Status BeforePostForward(int unit,
                                 const std::vector<at::Tensor*>& outputs);
  using Nodes = std::vector<NodePtr>;
  absl::Status EndForward(int unit, bool expects_backward, const Nodes& exits);

  // sharded_model_backward.cc
  void EnterBackward();
  void OnEndOfBackward();
  void OnBackwardLost();
  absl::Status FinishPendingFrom(uint64_t sequence);
  void RunParameterHooks(int unit, std::vector<at::Tensor>& gradients);
  absl::Status PostBackward(int unit, const std::vector<at::Tensor>& gradients,
                            bool reduces);
  void NoteEndOfStep();
  absl::Status CheckOrder();

  const std::unique_ptr<Runtime> runtime_;
  Schedule schedule_;
  Settings settings_;
  PrecisionSwitch precision_;
  const std::shared_ptr<comm::RankActivity> activity_;  // null: nobody asks
  const std::shared_ptr<ParameterOwner> owner_;
  std::vector<UnitState> units_;
  std::vector<TensorRange> ranges_;
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
  UnusedParameters unused_;
  std::thread::id forward_thread_;
  std::unique_ptr<UnitObserver> observer_;  // may be null
};

// A unit of a model, which lives as long as this.
struct UnitHandle {
  std::shared_ptr<ShardedModel> model;
  int unit;
};

// Returns the unit that `module` is; nothing if it is none, or its model is
// gone. The way to the model is the owner of the first parameter of the module,
// or of a module inside it. Constant time for modules of a sharded model;
// thread-safe.
std::optional<UnitHandle> FindUnit(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_MODEL_SHARDED_MODEL_H_
