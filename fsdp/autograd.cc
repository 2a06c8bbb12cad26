#include "fsdp/autograd.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_error.h"

namespace fsdp {
namespace {

using ::torch::autograd::Edge;
using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

// Common base, so that our edges can be told from others.
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

class ListeningNode : public FsdpNode {
 public:
  ListeningNode(std::string kind, WeakListener listener, int unit,
                std::string unit_name)
      : FsdpNode(std::move(kind), std::move(unit_name)),
        listener_(std::move(listener)),
        unit_(unit) {}

 protected:
  int unit() const { return unit_; }

  std::shared_ptr<BackwardListener> Listener() const {
    std::shared_ptr<BackwardListener> listener = listener_.lock();
    if (listener == nullptr) {
      throw StatusError(absl::FailedPreconditionError(absl::StrCat(
          "backward through unit ", unit_name(),
          " after its sharded model was destroyed: keep the model until "
          "backward is over")));
    }
    return listener;
  }

 private:
  const WeakListener listener_;
  const int unit_;
};

class UnitNode final : public ListeningNode {
 public:
  UnitNode(WeakListener listener, int unit, std::string unit_name)
      : ListeningNode("Unit", std::move(listener), unit, std::move(unit_name)) {
  }

  variable_list apply(variable_list&& gradients) override {
    Listener()->OnPostBackward({unit(), sequence_nr()}, gradients);
    return {};
  }
};

class ExitNode final : public ListeningNode {
 public:
  ExitNode(WeakListener listener, int unit, std::string unit_name,
           const std::shared_ptr<Node>& unit_node)
      : ListeningNode("Exit", std::move(listener), unit, std::move(unit_name)),
        unit_node_(unit_node),
        has_unit_node_(unit_node != nullptr),
        unit_node_sequence_(has_unit_node_ ? unit_node->sequence_nr() : 0) {}

  variable_list apply(variable_list&& gradients) override {
    ThrowIfError(CheckRecordsNoGraph(unit_name()));
    ThrowIfError(CheckComputesNoGradientOf(unit_node_.lock(), unit_name()));
    Listener()->OnPreBackward(
        {unit(), sequence_nr(), has_unit_node_, unit_node_sequence_});
    return std::move(gradients);
  }

 private:
  const std::weak_ptr<Node> unit_node_;
  const bool has_unit_node_;
  const uint64_t unit_node_sequence_;
};

class EntryNode final : public ListeningNode {
 public:
  EntryNode(WeakListener listener, int unit, std::string unit_name)
      : ListeningNode("Entry", std::move(listener), unit,
                      std::move(unit_name)) {}

  variable_list apply(variable_list&& gradients) override {
    Listener()->OnPostBackward({unit(), sequence_nr()}, {});
    return std::move(gradients);
  }
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

// Replaces each tensor that requires grad by an alias whose gradient passes
// through `node` on its way to the tensor's own edge.
bool PassThrough(const std::shared_ptr<Node>& node,
                 const std::vector<at::Tensor*>& tensors) {
  bool any = false;
  for (at::Tensor* tensor : tensors) {
    if (!tensor->defined() || !tensor->requires_grad()) continue;
    node->add_next_edge(torch::autograd::impl::gradient_edge(*tensor));
    // As detach(), which is an operator; both have one version.
    at::Tensor alias = tensor->tensor_data();
    const uint32_t slot = node->add_input_metadata(alias);
    torch::autograd::impl::set_gradient_edge(alias, Edge(node, slot));
    *tensor = std::move(alias);
    any = true;
  }
  return any;
}

}  // namespace

bool InsideBackward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

std::shared_ptr<Node> AttachUnitNode(const WeakListener& listener, int unit,
                                     std::string name,
                                     const ParameterSlots& slots) {
  auto node = std::make_shared<UnitNode>(listener, unit, std::move(name));
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

bool AttachExitNode(const WeakListener& listener, int unit, std::string name,
                    const std::shared_ptr<Node>& unit_node,
                    const std::vector<at::Tensor*>& outputs) {
  return PassThrough(
      std::make_shared<ExitNode>(listener, unit, std::move(name), unit_node),
      outputs);
}

bool AttachEntryNode(const WeakListener& listener, int unit, std::string name,
                     const std::vector<at::Tensor*>& inputs) {
  return PassThrough(
      std::make_shared<EntryNode>(listener, unit, std::move(name)), inputs);
}

std::shared_ptr<Node> MakeSentinel(const at::Tensor& parameter,
                                   const std::string& name) {
  auto node = std::make_shared<SentinelNode>(name);
  node->add_input_metadata(parameter);
  return node;
}

void AttachSentinel(const at::Tensor& parameter,
                    const std::shared_ptr<Node>& sentinel) {
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

absl::Status CheckComputesNoGradientOf(const std::shared_ptr<Node>& unit_node,
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

}  // namespace fsdp
