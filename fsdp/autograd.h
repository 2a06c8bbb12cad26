// Turns LibTorch's autograd into events of units: the gradient reaches a unit's
// output; all gradients of a unit's parameters are there.
//
// torch::nn::Module has no hooks, so three kinds of graph nodes carry them:
//   Exit   around a unit's outputs; runs before any operator of the unit
//   Unit   what the unit's parameters point to instead of accumulating into
//          .grad; gets all gradients of one forward at once, after every
//          operator of the unit
//   Entry  around the inputs of a unit with nothing trainable, in place of Unit
#ifndef FSDP_AUTOGRAD_H_
#define FSDP_AUTOGRAD_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace fsdp {

// Whether this thread runs a backward.
bool InsideBackward();

struct PreBackwardInfo {
  int unit;
  // Sequence number of the Exit node: any node with a higher one has run by now
  // or never will.
  uint64_t exit_sequence;
  // Whether this forward had a Unit node, and its sequence number.
  bool has_unit_node;
  uint64_t unit_node_sequence;
};

struct PostBackwardInfo {
  int unit;
  uint64_t node_sequence;  // of the Unit or Entry node
};

// Receives the events of one sharded model. Called inside backward, on the
// thread that runs it; reports errors by throwing StatusError.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void OnPreBackward(const PreBackwardInfo& info) = 0;
  // gradients[k] belongs to the k-th slot of the unit's node: undefined, of any
  // strides, or sparse. Empty for a unit with nothing trainable.
  virtual void OnPostBackward(const PostBackwardInfo& info,
                              const std::vector<at::Tensor>& gradients) = 0;
};

// The nodes keep only a weak reference: a graph may outlive its model.
using WeakListener = std::weak_ptr<BackwardListener>;

// Parameters of slot k: one tensor, or several that are tied without being the
// same object. A slot may be empty (a frozen parameter): it gets no gradient.
using ParameterSlots = std::vector<std::vector<at::Tensor>>;

// Creates a Unit node for one forward of `unit` and points the parameters to
// it. Call in the thread that runs the forward and before the unit's first
// operator: the engine runs the youngest ready node first, so this one runs
// after all of the unit's operators.
std::shared_ptr<torch::autograd::Node> AttachUnitNode(
    const WeakListener& listener, int unit, std::string name,
    const ParameterSlots& slots);

// Wraps the outputs of one forward in an Exit node: each defined tensor of
// `outputs` that requires grad is replaced by an alias. `unit_node` is that of
// the same forward, or null. Returns whether any was wrapped.
// When the gradient arrives, and before anything is gathered, these throw
// StatusError (FailedPrecondition): a backward that builds a graph
// (create_graph), and torch::autograd::grad with respect to a parameter of the
// unit, which would see this rank's gradient alone.
bool AttachExitNode(const WeakListener& listener, int unit, std::string name,
                    const std::shared_ptr<torch::autograd::Node>& unit_node,
                    const std::vector<at::Tensor*>& outputs);

// Wraps the inputs of a unit with nothing trainable. Returns whether any input
// requires grad; without, backward never enters the unit.
bool AttachEntryNode(const WeakListener& listener, int unit, std::string name,
                     const std::vector<at::Tensor*>& inputs);

// A node that refuses gradients with an error naming the parameter `name`. A
// trainable parameter points to it between steps: it is then no leaf, so that
// torch::optim refuses it.
std::shared_ptr<torch::autograd::Node> MakeSentinel(const at::Tensor& parameter,
                                                    const std::string& name);
// Points `parameter` to the only slot of `sentinel`.
void AttachSentinel(const at::Tensor& parameter,
                    const std::shared_ptr<torch::autograd::Node>& sentinel);

// Makes `parameter` a leaf again, so that requires_grad() tells what the user
// has set. An edge on a frozen parameter would train it.
void ClearEdge(const at::Tensor& parameter);

// FailedPrecondition, inside a node of a backward with create_graph.
absl::Status CheckRecordsNoGraph(const std::string& unit_name);
// FailedPrecondition, inside backward, when the gradients that it is to return
// are among those of `unit_node`, which may be null.
absl::Status CheckComputesNoGradientOf(
    const std::shared_ptr<torch::autograd::Node>& unit_node,
    const std::string& unit_name);

// Whether `parameter` points to one of our nodes.
bool HasOurEdge(const at::Tensor& parameter);

}  // namespace fsdp

#endif  // FSDP_AUTOGRAD_H_
