// Makes events of units out of LibTorch's autograd: the gradient reaches a
// unit's output, and all gradients of a unit's parameters are there.
//
// torch::nn::Module has no hooks, so the graph carries them:
//   exits    hooks on the nodes by which a gradient enters the unit's graph,
//            those of its outputs; the first runs before any operator of the
//            unit
//   Unit     a node that the unit's parameters point to instead of
//            accumulating into .grad; gets all gradients of one forward at
//            once, after every operator of the unit
//   entries  hooks on the nodes before a unit with nothing trainable, in place
//            of Unit
// Exits and entries leave tensors and graph as they are, so what a unit returns
// and takes can be viewed and modified in place as without sharding.
#ifndef FSDP_AUTOGRAD_AUTOGRAD_H_
#define FSDP_AUTOGRAD_AUTOGRAD_H_

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/autograd_node.h"

namespace fsdp {

// Returns whether this thread runs a backward.
bool InsideBackward();

// Sequence numbers count on one thread, `forward_thread`.
struct PreBackwardInfo {
  int unit;
  // Any node with this sequence number or a higher one has run or never will.
  uint64_t exit_sequence;
  // Nodes of this forward have this number or a higher one; it is that of the
  // Unit node if there is one. Unset: the caller of OnPreBackward() knows when
  // the backward of the unit is over.
  std::optional<uint64_t> start_sequence;
  bool has_unit_node;
  std::optional<uint64_t> forward_thread = std::nullopt;
  bool in_full_precision = false;  // as UnitForward has it
};

struct PostBackwardInfo {
  int unit;
  uint64_t node_sequence;  // of the Unit node
  std::optional<uint64_t> forward_thread = std::nullopt;
};

// Receives the events of one sharded model, inside backward on the thread that
// runs it. Reports errors by throwing StatusError.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  // Called once per forward and backward, by whichever exit comes first.
  virtual void OnPreBackward(const PreBackwardInfo& info) = 0;
  // gradients[k] belongs to the k-th slot of the unit's node. It is undefined,
  // sparse or of any strides. `gradients` are empty for a unit with nothing
  // trainable. As far as autograd knows, the callee has them to itself.
  virtual void OnPostBackward(const PostBackwardInfo& info,
                              std::vector<at::Tensor> gradients) = 0;
  // Nodes with `start_sequence` or a higher number have run or never will.
  virtual void OnLeft(uint64_t start_sequence) = 0;
};

// Nodes keep only a weak reference, because a graph may outlive its model.
using WeakListener = std::weak_ptr<BackwardListener>;

// The tensors of each slot are one parameter: one tensor, or several tied ones
// that are not the same object. A slot of a frozen parameter may be empty; it
// gets no gradient.
using ParameterSlots = std::vector<std::vector<at::Tensor>>;

// Makes a Unit node for one forward of `unit` and points the parameters to it.
// Call it on the forward's thread before the unit's first operator: the engine
// runs the youngest ready node first, and so this one after all of the unit's
// operators.
NodePtr AttachUnitNode(const WeakListener& listener, int unit, std::string name,
                       const ParameterSlots& slots);

// Remembers the tensors that one forward gets, without keeping their memory.
class SeenTensors {
 public:
  void Add(const at::Tensor& tensor);

  // Returns those that are alive, and the tensors that they are views of.
  std::vector<at::Tensor> Alive() const;
  // Returns whether `node` had produced one of them when it was added.
  bool WasProducedBy(const torch::autograd::Node& node) const;

 private:
  using Weak =
      c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  void AddOne(const at::Tensor& tensor);

  std::vector<Weak> tensors_;
  std::vector<const torch::autograd::Node*> producers_;
};

// One forward of a unit.
struct UnitForward {
  int unit;
  std::string name;
  // at::sequence_number::peek() before its first node.
  uint64_t start_sequence;
  NodePtr unit_node;  // or null
  // Is handed to OnPreBackward(): the precision in which the forward computes.
  bool in_full_precision = false;
};

// Call it at the end of a forward, on its thread: makes the nodes by which a
// gradient can enter its graph announce that. They are those of `outputs`, of
// inputs that it has modified in place, and of the tensors that these are views
// of, since a view that is modified later leads to its base; nodes from before
// the forward are left alone. Returns them; without any, no backward will
// enter.
//
// When the gradient arrives, before anything is gathered, they throw
// StatusError (FailedPrecondition) for a backward that builds a graph
// (create_graph), and for torch::autograd::grad with respect to a parameter of
// the unit, which would return this rank's gradient alone.
std::vector<NodePtr> AttachExits(const WeakListener& listener,
                                 const UnitForward& forward,
                                 const std::vector<at::Tensor*>& outputs,
                                 const SeenTensors& inputs);

// Call it at the beginning of the forward of a unit with nothing trainable:
// makes the node that produced `input` announce that the gradient has left the
// unit.
void AttachEntry(const WeakListener& listener, uint64_t start_sequence,
                 const at::Tensor& input);

// Makes a node that refuses gradients with an error that names the parameter
// `name`. A trainable parameter points to it between steps, so it is no leaf
// and torch::optim refuses it.
NodePtr MakeSentinel(const at::Tensor& parameter, const std::string& name);
// Points `parameter` to the only slot of `sentinel`.
void AttachSentinel(const at::Tensor& parameter, const NodePtr& sentinel);

// Makes `parameter` a leaf again, so that requires_grad() is what the user has
// set; an edge on a frozen parameter would train it.
void ClearEdge(const at::Tensor& parameter);

// FailedPrecondition inside a node of a backward with create_graph.
absl::Status CheckRecordsNoGraph(const std::string& unit_name);
// FailedPrecondition inside a backward that is to return a gradient of
// `unit_node`, which may be null.
absl::Status CheckComputesNoGradientOf(const NodePtr& unit_node,
                                       const std::string& unit_name);

// Returns whether `parameter` points to one of our nodes.
bool HasOurEdge(const at::Tensor& parameter);

// Returns whether at::Tensor::register_hook() was called on `tensor`. Autograd
// runs such hooks when it accumulates a gradient into a leaf, which it does not
// do for sharded parameters.
bool HasTensorHooks(const at::Tensor& tensor);
// Returns whether `tensor` has hooks that run after its gradient was
// accumulated.
bool HasPostAccumulateHooks(const at::Tensor& tensor);

// Runs the hooks of register_hook() in the order of registration, each on the
// result of the one before, and returns the last result. Throws what they
// throw, and c10::Error for a result of another shape.
at::Tensor RunTensorHooks(const at::Tensor& tensor, const at::Tensor& gradient);

// --- Units and checkpointed regions ------------------------------------------
// These tell regions, and units around and inside them, of each other, per
// thread: a forward or its recomputation runs on one.

// A unit whose forward is under way with grad, so that code in it may use its
// parameters.
struct RunningUnit {
  std::string name;
  ParameterSlots trainable;
  // Some parameters of its modules belong to no unit.
  bool may_use_other_parameters = false;
  // Its modules' buffers; never null.
  std::shared_ptr<const std::vector<at::Tensor>> buffers;
};
using RunningUnits = std::vector<std::shared_ptr<const RunningUnit>>;

// Units under way on this thread, the outermost first.
const RunningUnits& UnitsUnderWay();

// Adds a unit to UnitsUnderWay() while this lives.
class UnitScope {
 public:
  explicit UnitScope(std::shared_ptr<const RunningUnit> unit);
  UnitScope(const UnitScope&) = delete;
  UnitScope& operator=(const UnitScope&) = delete;
  ~UnitScope();
};

// The first forward of a region, which runs without grad.
class RegionScope {
 public:
  // Says whether the region will be recomputed, and whether a gradient flows
  // through an argument, as far as is known.
  RegionScope(bool requires_grad, bool arguments_require_grad);
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;
  ~RegionScope();

  // Returns the innermost scope under way on this thread, or null.
  static RegionScope* Current();

  // Notes that a unit with trainable parameters runs inside.
  void NoteTrainable() { requires_grad_ = passes_grad_ = true; }

  bool requires_grad() const { return requires_grad_; }
  // Returns whether the recomputation of what has just run will surely have a
  // backward.
  bool passes_grad() const { return passes_grad_; }

 private:
  bool requires_grad_;
  bool passes_grad_;
  RegionScope* const outer_;
};

// The recomputation of a region. Only `units` are under way in it, although the
// backward around it may run inside another forward. With `restores_buffers` it
// undoes its changes in buffers of these units and of units inside: it is one
// forward, not two.
class RecomputeScope {
 public:
  RecomputeScope(RunningUnits units, bool restores_buffers);
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  ~RecomputeScope();

  // Returns the innermost scope under way on this thread, or null.
  static RecomputeScope* Current();

  // Call it before `buffers` may be changed.
  void KeepBuffers(const std::vector<at::Tensor>& buffers);

  // Call it when the function has run again, before its graph is used. It calls
  // what AtEnd() was given, the last one first.
  void Finish();
  void AtEnd(std::function<void()> call);

 private:
  void RestoreBuffers();

  RunningUnits units_;
  RegionScope* region_ = nullptr;
  RecomputeScope* recomputation_ = this;
  const bool restores_buffers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;  // buffers and copies
  std::vector<std::function<void()>> at_end_;
};

}  // namespace fsdp

#endif  // FSDP_AUTOGRAD_AUTOGRAD_H_
