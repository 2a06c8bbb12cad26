#include "fsdp/autograd/autograd.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace fsdp {
namespace {

using ::torch::autograd::Edge;
using ::torch::autograd::FunctionPreHook;
using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

thread_local RunningUnits units_under_way;
thread_local RegionScope* current_region = nullptr;
thread_local RecomputeScope* current_recomputation = nullptr;

// The common base tells our edges from others.
class FsdpNode : public Node {
 public:
  FsdpNode(std::string kind, std::string unit_name)
      : kind_(std::move(kind)), unit_name_(std::move(unit_name)) {}

  std::string name() const override {
    return absl::StrCat("fsdp::", kind_, "(", unit_name_, ")");
  }

 protected:
  const std::string& unit_name() const { return unit_name_; }

 private:
  const std::string kind_;
  const std::string unit_name_;
};

std::shared_ptr<BackwardListener> Lock(const WeakListener& listener,
                                       const std::string& unit_name) {
  std::shared_ptr<BackwardListener> result = listener.lock();
  if (result == nullptr) {
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "backward through unit ", unit_name,
        " after its sharded model was destroyed: keep the model until "
        "backward is over")));
  }
  return result;
}

class UnitNode final : public FsdpNode {
 public:
  UnitNode(WeakListener listener, int unit, std::string unit_name)
      : FsdpNode("Unit", std::move(unit_name)),
        listener_(std::move(listener)),
        unit_(unit) {}

  variable_list apply(variable_list&& gradients) override {
    Lock(listener_, unit_name())
        ->OnPostBackward({unit_, sequence_nr(), thread_id()},
                         std::move(gradients));
    return {};
  }

  // A hook that is registered while a parameter leads here is among the
  // parameter's own hooks, which the listener runs.
  std::vector<std::unique_ptr<FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    return no_hooks_;
  }

 private:
  const WeakListener listener_;
  const int unit_;
  std::vector<std::unique_ptr<FunctionPreHook>> no_hooks_;
};

// The exits of one forward share this.
class Announcement {
 public:
  Announcement(WeakListener listener, const UnitForward& forward)
      : listener_(std::move(listener)),
        name_(forward.name),
        unit_node_(forward.unit_node),
        info_{forward.unit,
              at::sequence_number::peek(),
              forward.start_sequence,
              forward.unit_node != nullptr,
              at::RecordFunction::currentThreadId(),
              forward.in_full_precision} {}

  void Make() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (made_in_ == task) return;
    ThrowIfError(CheckRecordsNoGraph(name_));
    ThrowIfError(CheckComputesNoGradientOf(unit_node_.lock(), name_));
    Lock(listener_, name_)->OnPreBackward(info_);
    made_in_ = task;
  }

 private:
  const WeakListener listener_;
  const std::string name_;
  const WeakNodePtr unit_node_;
  const PreBackwardInfo info_;
  int made_in_ = -1;  // the last backward's task
};

// One node may be the exit of several units: a unit may return what a unit
// inside it has returned.
class ExitHook final : public FunctionPreHook {
 public:
  variable_list operator()(const variable_list& gradients) override {
    for (auto it = announcements_.rbegin(); it != announcements_.rend(); ++it) {
      (*it)->Make();
    }
    return gradients;
  }

  void Add(std::shared_ptr<Announcement> announcement) {
    announcements_.push_back(std::move(announcement));
  }

 private:
  std::vector<std::shared_ptr<Announcement>> announcements_;  // inner first
};

ExitHook& ExitHookOf(Node& node) {
  for (const std::unique_ptr<FunctionPreHook>& hook : node.pre_hooks()) {
    if (auto* exit = dynamic_cast<ExitHook*>(hook.get())) return *exit;
  }
  auto hook = std::make_unique<ExitHook>();
  ExitHook& result = *hook;
  node.add_pre_hook(std::move(hook));
  return result;
}

class EntryHook final : public FunctionPreHook {
 public:
  EntryHook(WeakListener listener, uint64_t start_sequence)
      : listener_(std::move(listener)), start_sequence_(start_sequence) {}

  variable_list operator()(const variable_list& gradients) override {
    if (auto listener = listener_.lock()) listener->OnLeft(start_sequence_);
    return gradients;
  }

 private:
  const WeakListener listener_;
  const uint64_t start_sequence_;
};

class SentinelNode final : public FsdpNode {
 public:
  explicit SentinelNode(std::string parameter_name)
      : FsdpNode("Sharded", std::move(parameter_name)) {}

  variable_list apply(variable_list&&) override {
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        "a gradient reached parameter ", unit_name(),
        " outside a forward of its unit: use the parameter inside the unit's "
        "forward only")));
  }
};

// Returns the nodes through which a gradient reaches `tensor`, whatever is done
// to it later.
std::vector<NodePtr> NodesOf(const at::Tensor& tensor) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  if (view == nullptr || !view->has_bw_view()) return {tensor.grad_fn()};
  std::vector<NodePtr> nodes = {view->get_backward_view().base_.grad_fn()};
  // After an in-place change autograd makes a new node, which leads to the
  // base's.
  if (view->get_attr_version() == tensor._version()) {
    nodes.emplace_back(view->grad_fn_);
  }
  return nodes;
}

bool IsOfThisThread(const Node& node) {
  return node.thread_id() == at::RecordFunction::currentThreadId();
}

// Returns whether a forward that began with `start_sequence` has made `node`.
// Numbers of another thread, which may have run a part of it, say nothing.
bool WasMadeSince(uint64_t start_sequence, const SeenTensors& inputs,
                  const Node& node) {
  return IsOfThisThread(node) ? node.sequence_nr() >= start_sequence
                              : !inputs.WasProducedBy(node);
}

}  // namespace

bool InsideBackward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

NodePtr AttachUnitNode(const WeakListener& listener, int unit, std::string name,
                       const ParameterSlots& slots) {
  auto node = MakeNode<UnitNode>(listener, unit, std::move(name));
  for (const std::vector<at::Tensor>& tensors : slots) {
    if (tensors.empty()) {
      node->add_input_metadata(Node::undefined_input());
      continue;
    }
    const uint32_t slot = node->add_input_metadata(tensors.front());
    for (const at::Tensor& tensor : tensors) {
      torch::autograd::impl::set_gradient_edge(tensor, Edge(node, slot));
    }
  }
  return node;
}

void SeenTensors::Add(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  AddOne(tensor);
  if (tensor.is_view()) AddOne(at::Tensor(tensor._base()));
}

void SeenTensors::AddOne(const at::Tensor& tensor) {
  tensors_.emplace_back(tensor.getIntrusivePtr());
  for (const NodePtr& node : NodesOf(tensor)) {
    producers_.push_back(node.get());
  }
}

std::vector<at::Tensor> SeenTensors::Alive() const {
  std::vector<at::Tensor> alive;
  for (const Weak& weak : tensors_) {
    if (auto tensor = weak.lock()) alive.emplace_back(std::move(tensor));
  }
  return alive;
}

bool SeenTensors::WasProducedBy(const Node& node) const {
  return absl::c_linear_search(producers_, &node);
}

std::vector<NodePtr> AttachExits(const WeakListener& listener,
                                 const UnitForward& forward,
                                 const std::vector<at::Tensor*>& outputs,
                                 const SeenTensors& inputs) {
  std::vector<NodePtr> exits;
  const auto add = [&](const at::Tensor& tensor) {
    for (NodePtr& node : NodesOf(tensor)) {
      if (node == nullptr ||
          !WasMadeSince(forward.start_sequence, inputs, *node) ||
          absl::c_linear_search(exits, node)) {
        continue;
      }
      exits.push_back(std::move(node));
    }
  };
  for (const at::Tensor* output : outputs) {
    if (output->defined()) add(*output);
  }
  for (const at::Tensor& input : inputs.Alive()) add(input);
  if (exits.empty()) return exits;
  const auto announcement = std::make_shared<Announcement>(listener, forward);
  for (const NodePtr& node : exits) {
    ExitHookOf(*node).Add(announcement);
  }
  return exits;
}

void AttachEntry(const WeakListener& listener, uint64_t start_sequence,
                 const at::Tensor& input) {
  if (!input.defined()) return;
  for (const NodePtr& node : NodesOf(input)) {
    // Numbers of another thread say nothing about this thread's nodes.
    if (node == nullptr || !IsOfThisThread(*node)) continue;
    node->add_pre_hook(std::make_unique<EntryHook>(listener, start_sequence));
  }
}

NodePtr MakeSentinel(const at::Tensor& parameter, const std::string& name) {
  auto node = MakeNode<SentinelNode>(name);
  node->add_input_metadata(parameter);
  return node;
}

void AttachSentinel(const at::Tensor& parameter, const NodePtr& sentinel) {
  torch::autograd::impl::set_gradient_edge(parameter, Edge(sentinel, 0));
}

void ClearEdge(const at::Tensor& parameter) {
  torch::autograd::impl::set_gradient_edge(parameter, Edge());
}

absl::Status CheckRecordsNoGraph(const std::string& unit_name) {
  if (!at::GradMode::is_enabled()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "backward with create_graph=true through unit ", unit_name,
      ": a sharded parameter has no gradient of a gradient. Take double "
      "derivatives of an unsharded model"));
}

absl::Status CheckComputesNoGradientOf(const NodePtr& unit_node,
                                       const std::string& unit_name) {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr || unit_node == nullptr) return absl::OkStatus();
  const auto found = exec_info->find(unit_node.get());
  if (found == exec_info->end() || found->second.captures_ == nullptr) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "torch::autograd::grad with respect to a parameter of unit ", unit_name,
      ": the result would be this rank's gradient alone. Call backward and "
      "read .grad of Parameters()"));
}

bool HasOurEdge(const at::Tensor& parameter) {
  return dynamic_cast<const FsdpNode*>(parameter.grad_fn().get()) != nullptr;
}

bool HasTensorHooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && !meta->hooks_.empty();
}

bool HasPostAccumulateHooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}

at::Tensor RunTensorHooks(const at::Tensor& tensor,
                          const at::Tensor& gradient) {
  std::vector<at::Tensor> values = {gradient};
  // They are the tensor's own, wherever its gradient edge leads.
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  for (const auto& hook : meta->hooks_) values = (*hook)(values);
  return values.front();
}

// --- Units and checkpointed regions ------------------------------------------

const RunningUnits& UnitsUnderWay() { return units_under_way; }

UnitScope::UnitScope(std::shared_ptr<const RunningUnit> unit) {
  units_under_way.push_back(std::move(unit));
}

UnitScope::~UnitScope() { units_under_way.pop_back(); }

RegionScope::RegionScope(bool requires_grad, bool arguments_require_grad)
    : requires_grad_(requires_grad),
      passes_grad_(arguments_require_grad),
      outer_(current_region) {
  current_region = this;
}

RegionScope::~RegionScope() { current_region = outer_; }

RegionScope* RegionScope::Current() { return current_region; }

RecomputeScope::RecomputeScope(RunningUnits units, bool restores_buffers)
    : units_(std::move(units)), restores_buffers_(restores_buffers) {
  for (const auto& unit : units_) KeepBuffers(*unit->buffers);
  units_.swap(units_under_way);
  std::swap(region_, current_region);
  std::swap(recomputation_, current_recomputation);
}

RecomputeScope::~RecomputeScope() {
  units_.swap(units_under_way);
  std::swap(region_, current_region);
  std::swap(recomputation_, current_recomputation);
  RestoreBuffers();
}

RecomputeScope* RecomputeScope::Current() { return current_recomputation; }

void RecomputeScope::KeepBuffers(const std::vector<at::Tensor>& buffers) {
  if (!restores_buffers_) return;
  const c10::NoGradGuard no_grad;
  for (const at::Tensor& buffer : buffers) {
    const bool is_kept = absl::c_any_of(
        kept_, [&](const auto& kept) { return kept.first.is_same(buffer); });
    if (buffer.defined() && !is_kept) {
      kept_.emplace_back(buffer, buffer.clone());
    }
  }
}

// Restores values without counting the write, so that a buffer saved for
// backward is not stale to autograd.
void RecomputeScope::RestoreBuffers() {
  const c10::NoGradGuard no_grad;
  for (const auto& [buffer, copy] : kept_) {
    if (buffer.sizes() == copy.sizes()) {
      buffer.variable_data().copy_(copy);
    } else {
      buffer.set_data(copy);
    }
  }
}

void RecomputeScope::AtEnd(std::function<void()> call) {
  at_end_.push_back(std::move(call));
}

void RecomputeScope::Finish() {
  while (!at_end_.empty()) {
    const std::function<void()> call = std::move(at_end_.back());
    at_end_.pop_back();
    call();
  }
}

}  // namespace fsdp
