#include "fsdp/recompute/checkpoint.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/autograd_node.h"
#include "base/status_macros.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/recompute/activation_offload.h"

namespace fsdp::checkpoint_internal {
namespace {

using ::torch::autograd::Edge;
using ::torch::autograd::FunctionPreHook;
using ::torch::autograd::Node;
using ::torch::autograd::variable_list;

std::string RegionName(const RunningUnits& units, const std::string& unit) {
  if (!unit.empty()) return absl::StrCat("the recomputed unit ", unit);
  if (units.empty()) return "a checkpointed region";
  return absl::StrCat("a checkpointed region in unit ", units.back()->name);
}

// The version of a tensor that may be gone.
class TensorVersion {
 public:
  explicit TensorVersion(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_inference()) return;
    counter_ = tensor.unsafeGetTensorImpl()->version_counter();
    version_ = Now();
  }

  // Returns false if the tensor, or one that shares its memory, was modified in
  // place.
  bool IsCurrent() const { return Now() == version_; }

 private:
  uint32_t Now() const {
    return counter_.enabled() ? counter_.current_version() : 0;
  }

  c10::VariableVersion counter_{c10::VariableVersion::DISABLED};
  uint32_t version_ = 0;
};

bool RequiresGrad(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// Returns whether code that runs in `units` may use parameters that require
// grad; without a unit it may.
bool MayUseTrainable(const RunningUnits& units) {
  for (const auto& unit : units) {
    if (unit->may_use_other_parameters) return true;
    for (const std::vector<at::Tensor>& slot : unit->trainable) {
      if (!slot.empty()) return true;
    }
  }
  return units.empty();
}

bool AnyRequiresGrad(const std::vector<at::Tensor*>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor* t) { return RequiresGrad(*t); });
}

// Returns the CPU and the devices of the arguments.
std::vector<c10::Device> DevicesOf(const std::vector<at::Tensor*>& arguments) {
  std::vector<c10::Device> devices = {c10::Device(c10::kCPU)};
  for (const at::Tensor* tensor : arguments) {
    if (!tensor->defined()) continue;
    if (std::find(devices.begin(), devices.end(), tensor->device()) ==
        devices.end()) {
      devices.push_back(tensor->device());
    }
  }
  return devices;
}

// The tensors in a region's arguments, without their graph, from forward to
// backward.
class RegionArguments {
 public:
  // Takes `tensors`, leaving undefined ones. With `offload` they leave memory,
  // except leaves that require grad: whoever wants their gradient holds them.
  RegionArguments(const std::vector<at::Tensor*>& tensors,
                  ActivationOffload* offload, std::string region_name)
      : region_name_(std::move(region_name)) {
    std::vector<bool> stays;
    for (at::Tensor* tensor : tensors) {
      stays.push_back(tensor->defined() && tensor->is_leaf() &&
                      tensor->requires_grad());
      versions_.emplace_back(*tensor);
      tensors_.push_back(tensor->defined() ? tensor->detach() : at::Tensor());
      tensor->reset();
    }
    if (offload == nullptr) return;
    at::Tensor none;
    std::vector<at::Tensor*> may_move;
    may_move.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      may_move.push_back(stays[i] ? &none : &tensors_[i]);
    }
    moved_ = offload->MoveOut(may_move, region_name_);
  }

  // FailedPrecondition gives the number of a tensor that was modified.
  absl::Status CheckUnmodified() const {
    for (size_t i = 0; i < versions_.size(); ++i) {
      if (versions_[i].IsCurrent()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "tensor ", i, " in the arguments of ", region_name_,
          " was modified in place between its forward and its backward, which "
          "computes with it again: modify a copy"));
    }
    return absl::OkStatus();
  }

  // Returns what was taken. The caller detaches it before use.
  absl::StatusOr<std::vector<at::Tensor>> Get() {
    if (moved_ == nullptr) return tensors_;
    FSDP_ASSIGN_OR_RETURN(std::vector<at::Tensor> tensors, moved_->MoveIn());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors_[i].defined()) tensors[i] = tensors_[i];
    }
    return tensors;
  }

 private:
  const std::string region_name_;
  std::vector<at::Tensor> tensors_;  // undefined while they are in `moved_`
  std::vector<TensorVersion> versions_;
  std::unique_ptr<MovedArguments> moved_;  // null: none
};

// A computation depends on this besides its arguments: on the default
// generators and autocast of the CPU and of further devices, as they are on the
// thread that captures them. Generators are included only with `random`.
class AmbientState {
 public:
  AmbientState(std::vector<c10::Device> devices, bool random)
      : devices_(std::move(devices)) {
    for (const c10::Device& device : devices_) {
      if (random) {
        at::Generator generator = at::globalContext().defaultGenerator(device);
        const std::lock_guard<std::mutex> lock(generator.mutex());
        generator_states_.push_back(generator.get_state());
      }
      if (!at::autocast::is_autocast_available(device.type())) continue;
      autocasts_.push_back({device.type(),
                            at::autocast::is_autocast_enabled(device.type()),
                            at::autocast::get_autocast_dtype(device.type())});
    }
  }

  // Returns the present state of the same devices.
  AmbientState Present() const {
    return AmbientState(devices_, /*random=*/!generator_states_.empty());
  }

  void Apply() const {
    for (size_t i = 0; i < generator_states_.size(); ++i) {
      at::Generator generator =
          at::globalContext().defaultGenerator(devices_[i]);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(generator_states_[i]);
    }
    for (const Autocast& autocast : autocasts_) {
      at::autocast::set_autocast_enabled(autocast.type, autocast.enabled);
      at::autocast::set_autocast_dtype(autocast.type, autocast.dtype);
    }
    at::autocast::set_autocast_cache_enabled(autocast_cache_);
  }

 private:
  struct Autocast {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };

  std::vector<c10::Device> devices_;
  std::vector<at::Tensor> generator_states_;  // of devices_, or none
  std::vector<Autocast> autocasts_;
  bool autocast_cache_ = at::autocast::is_autocast_cache_enabled();
};

// The end of a recomputed graph: keeps the gradients of the region's inputs.
class SinkNode final : public Node {
 public:
  enum class Takes { kArguments, kParameters };
  explicit SinkNode(Takes takes) : takes_(takes) {}

  std::string name() const override { return "fsdp::RegionInputs"; }

  variable_list apply(variable_list&& gradients) override {
    gradients_ = std::move(gradients);
    return {};
  }

  // A parameter's hooks run where its whole gradient arrives, outside the
  // region.
  std::vector<std::unique_ptr<FunctionPreHook>>& tensor_pre_hooks() noexcept
      override {
    return takes_ == Takes::kParameters ? no_hooks_ : Node::tensor_pre_hooks();
  }

  variable_list TakeGradients() {
    gradients_.resize(num_inputs());
    return std::move(gradients_);
  }

 private:
  const Takes takes_;
  std::vector<std::unique_ptr<FunctionPreHook>> no_hooks_;
  variable_list gradients_;
};

// While it lives, parameters lead to `sink` instead of to their units' nodes,
// which belong to the graph around the region.
class RedirectedParameters {
 public:
  RedirectedParameters(const RunningUnits& units,
                       const NodePtrTo<SinkNode>& sink)
      : sink_(sink) {
    for (const auto& unit : units) {
      for (const std::vector<at::Tensor>& slot : unit->trainable) {
        if (slot.empty()) continue;
        const uint32_t k = sink_->add_input_metadata(slot.front());
        for (const at::Tensor& tensor : slot) {
          before_.push_back(
              {tensor, Edge(tensor.grad_fn(), tensor.output_nr())});
          torch::autograd::impl::set_gradient_edge(tensor, Edge(sink_, k));
        }
      }
    }
  }
  RedirectedParameters(const RedirectedParameters&) = delete;
  RedirectedParameters& operator=(const RedirectedParameters&) = delete;

  // Leaves an edge that somebody else has set since: after an error the model
  // restores its own.
  ~RedirectedParameters() {
    for (const auto& [tensor, edge] : before_) {
      if (tensor.grad_fn() != sink_) continue;
      torch::autograd::impl::set_gradient_edge(tensor, edge);
    }
  }

 private:
  const NodePtrTo<SinkNode> sink_;
  std::vector<std::pair<at::Tensor, Edge>> before_;
};

constexpr char kDoTheSame[] =
    ": the function has to do the same in forward and in backward, so make "
    "what it depends on an argument";

// Returns what a recomputation is compared by.
std::string Describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " on ",
                  tensor.device());
}

bool CanHaveGradient(const at::Tensor& tensor) {
  return tensor.defined() &&
         torch::autograd::isDifferentiableType(tensor.scalar_type());
}

at::Tensor BaseOf(const at::Tensor& tensor) {
  return tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
}

// Makes `view` again as a view of `base`, which has its own base's memory.
at::Tensor ViewAgain(const at::Tensor& view, const at::Tensor& base) {
  const auto& info =
      torch::autograd::impl::get_view_autograd_meta(view)->get_backward_view();
  if (info.has_view_fn()) return info.view_fn()(base);
  return base.as_strided(view.sizes(), view.strides(), view.storage_offset());
}

at::Tensor AliasFrom(const NodePtr& node, const at::Tensor& tensor) {
  at::Tensor alias = tensor.detach();
  const uint32_t k = node->add_input_metadata(alias);
  torch::autograd::impl::set_gradient_edge(alias, Edge(node, k));
  return alias;
}

// The tensors in a region's arguments, which may leave memory meanwhile.
class GivenTensors {
 public:
  using Identity = const c10::TensorImpl*;

  void Add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    tensors_.insert(tensor.unsafeGetTensorImpl());
    const at::Tensor base = BaseOf(tensor);
    at::Tensor& source = bases_[base.unsafeGetTensorImpl()];
    if (tensor.requires_grad() && !base.requires_grad()) source = tensor;
  }

  bool Has(const at::Tensor& tensor) const {
    return tensors_.count(tensor.unsafeGetTensorImpl()) > 0;
  }
  // Returns whether a tensor is `base` or a view of it.
  bool HasMemoryOf(const at::Tensor& base) const {
    return bases_.count(base.unsafeGetTensorImpl()) > 0;
  }
  // Returns the tensor from which views of `base` get their gradient.
  at::Tensor SourceOf(const at::Tensor& base) const {
    const auto found = bases_.find(base.unsafeGetTensorImpl());
    const bool is_leaf = found != bases_.end() && found->second.defined();
    return is_leaf ? found->second : base;
  }

 private:
  std::set<Identity> tensors_;
  // Undefined, except for a base with a view that is a leaf of its own.
  std::map<Identity, at::Tensor> bases_;
};

// Relates the results of a region's forward, which records nothing, to those of
// its recomputation. Tensors that the region made get their gradient from its
// node; tensors that it was given keep theirs.
class RegionOutputs {
 public:
  // Replaces tensors of `outputs`: those that the region made by aliases whose
  // gradient goes to `node`, with one input of it for each memory, and views of
  // tensors that it was given by differentiable views of these. Views of each
  // other stay so, and any may be modified in place.
  void Wrap(const NodePtr& node, const GivenTensors& given,
            const std::vector<at::Tensor*>& outputs) {
    const c10::AutoGradMode grad(true);
    std::map<GivenTensors::Identity, std::set<GivenTensors::Identity>>
        tensors_of_base;
    std::map<GivenTensors::Identity, size_t> first_output;
    for (size_t i = 0; i < outputs.size(); ++i) {
      descriptions_.push_back(Describe(*outputs[i]));
      if (!CanHaveGradient(*outputs[i])) continue;
      const GivenTensors::Identity tensor = outputs[i]->unsafeGetTensorImpl();
      tensors_of_base[BaseOf(*outputs[i]).unsafeGetTensorImpl()].insert(tensor);
      first_output.try_emplace(tensor, i);
    }
    std::map<GivenTensors::Identity, at::Tensor> replacements;
    // Keeps the tensors alive whose addresses are the keys.
    std::vector<at::Tensor> replaced;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!CanHaveGradient(*outputs[i])) continue;
      const at::Tensor output = *outputs[i];
      replaced.push_back(output);
      const at::Tensor base = BaseOf(output);
      at::Tensor& replacement = replacements[output.unsafeGetTensorImpl()];
      // The forward records nothing that could require grad.
      const bool is_of_before = base.requires_grad() || given.HasMemoryOf(base);
      if (!replacement.defined() && is_of_before) {
        replacement = output.is_view() && !given.Has(output)
                          ? ViewAgain(output, given.SourceOf(base))
                          : output;
      } else if (!replacement.defined()) {
        const bool is_related =
            CanHaveGradient(base) &&
            tensors_of_base[base.unsafeGetTensorImpl()].size() > 1;
        const at::Tensor& root = is_related ? base : output;
        at::Tensor& alias = replacements[root.unsafeGetTensorImpl()];
        if (!alias.defined()) {
          const auto found = first_output.find(root.unsafeGetTensorImpl());
          const bool is_base = found == first_output.end();
          roots_.push_back(
              {is_base ? i : found->second, is_base, Describe(root)});
          alias = AliasFrom(node, root);
        }
        if (!root.is_same(output)) {
          replacements[output.unsafeGetTensorImpl()] = ViewAgain(output, alias);
        }
      }
      *outputs[i] = replacements[output.unsafeGetTensorImpl()];
    }
  }

  // Returns the results of a recomputation to which the gradients of the node's
  // inputs belong, in that order. FailedPrecondition, with `region_name`: the
  // results differ from the forward's.
  absl::StatusOr<std::vector<at::Tensor>> RootsOf(
      const std::vector<at::Tensor>& outputs,
      const std::string& region_name) const {
    if (outputs.size() != descriptions_.size()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "recomputing ", region_name, " gave ", outputs.size(),
          " tensors instead of ", descriptions_.size(), kDoTheSame));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::string description = Describe(outputs[i]);
      if (description == descriptions_[i]) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "recomputing ", region_name, " gave ", description, " as tensor ", i,
          " of its result instead of ", descriptions_[i], kDoTheSame));
    }
    std::vector<at::Tensor> tensors;
    for (const Root& root : roots_) {
      const at::Tensor& output = outputs[root.output];
      tensors.push_back(root.is_base ? BaseOf(output) : output);
      const std::string description = Describe(tensors.back());
      if (description == root.description) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "recomputing ", region_name, " gave a view of ", description,
          " as tensor ", root.output, " of its result instead of one of ",
          root.description, kDoTheSame));
    }
    return tensors;
  }

 private:
  // An output, or the base of which an output is a view.
  struct Root {
    size_t output;
    bool is_base;
    std::string description;
  };

  std::vector<std::string> descriptions_;  // of the outputs
  std::vector<Root> roots_;
};

// The backward of a region. Its inputs are the arguments and the parameters of
// the units around it, as if the region were one operator.
class RegionNode final : public Node {
 public:
  RegionNode(std::unique_ptr<RepeatableCall> call, RunningUnits units,
             AmbientState ambient, const CheckpointOptions& options,
             const std::string& unit)
      : call_(std::move(call)),
        units_(std::move(units)),
        ambient_(std::move(ambient)),
        options_(options),
        region_name_(RegionName(units_, unit)),
        is_unit_(!unit.empty()) {
    const std::vector<at::Tensor*> arguments = call_->Arguments();
    for (const at::Tensor* argument : arguments) {
      takes_gradient_.push_back(RequiresGrad(*argument));
      if (RequiresGrad(*argument)) {
        add_next_edge(torch::autograd::impl::gradient_edge(*argument));
      }
    }
    // Only the edges keep the graph before the region alive.
    arguments_ = std::make_unique<RegionArguments>(
        arguments, options_.offload.get(), region_name_);
    for (const auto& unit : units_) {
      for (const std::vector<at::Tensor>& slot : unit->trainable) {
        if (slot.empty()) continue;
        add_next_edge(torch::autograd::impl::gradient_edge(slot.front()));
      }
    }
  }

  std::string name() const override { return "fsdp::Checkpoint"; }

  void Wrap(const GivenTensors& given,
            const std::vector<at::Tensor*>& outputs) {
    outputs_.Wrap(getptr(), given, outputs);
  }

  variable_list apply(variable_list&& gradients) override {
    ThrowIfError(CheckBackward());
    auto arguments = MakeNode<SinkNode>(SinkNode::Takes::kArguments);
    auto parameters = MakeNode<SinkNode>(SinkNode::Takes::kParameters);
    std::vector<at::Tensor> roots;
    variable_list root_gradients;
    {
      const std::vector<at::Tensor> recomputed = ValueOrThrow(
          outputs_.RootsOf(Recompute(arguments, parameters), region_name_));
      for (size_t k = 0; k < recomputed.size(); ++k) {
        if (!gradients[k].defined() || !recomputed[k].requires_grad()) continue;
        roots.push_back(recomputed[k]);
        root_gradients.push_back(std::move(gradients[k]));
      }
    }
    gradients.clear();
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list result = arguments->TakeGradients();
    for (at::Tensor& gradient : parameters->TakeGradients()) {
      result.push_back(std::move(gradient));
    }
    return result;
  }

  void release_variables() override {
    call_.reset();
    arguments_.reset();
  }

 private:
  std::vector<at::Tensor> Recompute(const NodePtrTo<SinkNode>& sink,
                                    const NodePtrTo<SinkNode>& parameter_sink) {
    const std::vector<at::Tensor*> arguments = call_->Arguments();
    // The recomputed graph keeps what it needs of them.
    const auto release = absl::MakeCleanup([&arguments] {
      for (at::Tensor* argument : arguments) argument->reset();
    });
    {
      const std::vector<at::Tensor> values = ValueOrThrow(arguments_->Get());
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (!values[i].defined()) continue;
        *arguments[i] = values[i].detach();
        if (!takes_gradient_[i]) continue;
        torch::autograd::impl::set_gradient_edge(
            *arguments[i], Edge(sink, sink->add_input_metadata(*arguments[i])));
      }
    }
    const RedirectedParameters parameters(units_, parameter_sink);
    RecomputeScope scope(units_, options_.restore_buffers);
    for (const auto& module : options_.modules) {
      scope.KeepBuffers(module->buffers());
    }
    const AmbientState outside = ambient_.Present();
    ambient_.Apply();
    at::autocast::increment_nesting();
    const auto restore = absl::MakeCleanup([&outside] {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      outside.Apply();
    });
    const c10::AutoGradMode grad(true);
    std::vector<at::Tensor> result = call_->Repeat();
    scope.Finish();
    return result;
  }

  absl::Status CheckBackward() const {
    if (call_ == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat(
          "a second backward through ", region_name_,
          ", which the first has released: pass retain_graph to the first"));
    }
    if (at::GradMode::is_enabled()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "backward with create_graph=true through ", region_name_,
          ": a recomputed region has no second derivative. ",
          is_unit_ ? "Leave the unit out of Options::recompute.units"
                   : "Call the function without fsdp::Checkpoint",
          " for double derivatives"));
    }
    if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "torch::autograd::grad, or a backward with `inputs`, through ",
          region_name_,
          ": what it recomputes has gradients of its own. Call backward() "
          "without `inputs`, or ",
          is_unit_ ? "leave the unit out of Options::recompute.units"
                   : "the function without fsdp::Checkpoint"));
    }
    return arguments_->CheckUnmodified();
  }

  std::unique_ptr<RepeatableCall> call_;  // null once released
  const RunningUnits units_;              // around the region
  const AmbientState ambient_;
  const CheckpointOptions options_;
  const std::string region_name_;
  const bool is_unit_;  // chosen by Options::recompute.units
  // The tensors of `call_`, which holds them only while it is repeated.
  std::unique_ptr<RegionArguments> arguments_;  // null once released
  std::vector<bool> takes_gradient_;
  RegionOutputs outputs_;
};

}  // namespace

struct RegionForward::State {
  State(const CheckpointOptions& options,
        const std::vector<at::Tensor*>& arguments, std::string unit)
      : units(UnitsUnderWay()),
        scope(MayUseTrainable(units) || AnyRequiresGrad(arguments),
              AnyRequiresGrad(arguments)),
        ambient(DevicesOf(arguments), options.preserve_rng_state),
        options(options),
        unit(std::move(unit)) {
    for (const at::Tensor* tensor : arguments) versions.emplace_back(*tensor);
  }

  const RunningUnits units;  // around the region
  RegionScope scope;
  std::vector<TensorVersion> versions;  // of the arguments
  AmbientState ambient;
  const CheckpointOptions options;
  const std::string unit;
  const c10::NoGradGuard no_grad;
};

RegionForward::RegionForward(const CheckpointOptions& options,
                             const std::vector<at::Tensor*>& arguments,
                             std::string unit)
    : state_(std::make_unique<State>(options, arguments, std::move(unit))) {}

RegionForward::~RegionForward() = default;

void RegionForward::Finish(std::unique_ptr<RepeatableCall> call,
                           const std::vector<at::Tensor*>& outputs) {
  const std::vector<at::Tensor*> arguments = call->Arguments();
  for (size_t i = 0; i < state_->versions.size(); ++i) {
    if (state_->versions[i].IsCurrent()) continue;
    throw StatusError(absl::FailedPreconditionError(absl::StrCat(
        state_->unit.empty() ? "the function of " : "the forward of ",
        RegionName(state_->units, state_->unit), " modified tensor ", i,
        " in its arguments in place: backward could not compute with it again. "
        "Modify a copy")));
  }
  if (!state_->scope.requires_grad()) return;
  GivenTensors given;
  for (const at::Tensor* argument : arguments) given.Add(*argument);
  MakeNode<RegionNode>(std::move(call), state_->units,
                       std::move(state_->ambient), state_->options,
                       state_->unit)
      ->Wrap(given, outputs);
}

}  // namespace fsdp::checkpoint_internal
