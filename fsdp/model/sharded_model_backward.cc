// What ShardedModel does in backward.
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/status_error.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "comm/work.h"
#include "fsdp/autograd/parameter_hooks.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

constexpr char kOrderLabel[] = "the collectives of an iteration";

int GraphTask() { return torch::autograd::get_current_graph_task_id(); }

// Whether this backward computes all gradients rather than chosen ones.
bool BackwardComputesEverything() {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  return exec_info == nullptr || exec_info->empty();
}

// A parameter that was meant to be tied and is not, for example.
void WarnOfMissingGradients(const std::vector<NamedShard>& shards) {
  std::vector<absl::string_view> names;
  for (const NamedShard& named : shards) {
    if (named.shard.requires_grad() && !named.shard.grad().defined()) {
      names.push_back(named.name);
    }
  }
  if (names.empty()) return;
  TORCH_WARN(
      "fsdp: no rank has used these parameters in the first step, so ",
      "they have no gradient and are not trained: ", absl::StrJoin(names, ", "),
      ". Freeze them if that is meant; tie parameters by fsdp::Tie()");
}

}  // namespace

struct ShardedModel::BackwardUnderWay {
  ~BackwardUnderWay() {
    const std::shared_ptr<ShardedModel> lost =
        has_ended ? nullptr : model.lock();
    if (lost == nullptr) return;
    TorchToStatus("giving a backward up", [&] {
      lost->OnBackwardLost();
    }).IgnoreError();
  }

  std::weak_ptr<ShardedModel> model;
  bool has_ended = false;
};

absl::Status ShardedModel::Backward(const at::Tensor& loss, bool retain_graph) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    return absl::InvalidArgumentError(
        "Backward() takes a loss of one element that a forward with grad has "
        "produced; this one is undefined, has another size, or does not "
        "require grad");
  }
  FSDP_RETURN_IF_ERROR(CheckNoWholeAccess());
  absl::Status status = TorchToStatus("backward", [&] {
    loss.backward(/*gradient=*/{}, /*retain_graph=*/retain_graph);
  });
  // What comes first is the cause of what backward has thrown.
  absl::Status failure = TakeFailure();
  if (!failure.ok()) status = std::move(failure);
  if (status.ok()) return status;
  status = ExplainStaleGraph(std::move(status));
  GiveUpIteration(status);
  return status;
}

void ShardedModel::OnPreBackward(const PreBackwardInfo& info) {
  ThrowIfError(CheckNoWholeAccess());
  EnterBackward();
  ThrowIfError(CheckForwardThread(info.unit, info.forward_thread));
  if (observer_ != nullptr) {
    ThrowIfError(observer_->BeforePreBackward(info.unit));
  }
  ThrowIfError(CheckPrecisionOf(info));
  ThrowIfError(FinishPendingFrom(info.exit_sequence));
  ThrowIfError(TransitionOrAbort({EventKind::kPreBackward, info.unit}, {}));
  if (info.start_sequence.has_value()) {
    pending_.push_back(
        {info.unit, GraphTask(), *info.start_sequence, info.has_unit_node});
  }
}

void ShardedModel::OnPostBackward(const PostBackwardInfo& info,
                                  std::vector<at::Tensor> gradients) {
  EnterBackward();
  ThrowIfError(CheckForwardThread(info.unit, info.forward_thread));
  ThrowIfError(FinishPendingFrom(info.node_sequence + 1));
  while (!pending_.empty() && pending_.back().unit == info.unit &&
         pending_.back().start_sequence == info.node_sequence) {
    pending_.pop_back();
  }
  RunParameterHooks(info.unit, gradients);
  ThrowIfError(
      PostBackward(info.unit, gradients, /*reduces=*/!gradients.empty()));
}

void ShardedModel::OnLeft(uint64_t start_sequence) {
  if (!pending_.empty()) ThrowIfError(FinishPendingFrom(start_sequence));
}

// A user's hook sees what it would see without sharding: the sum over all uses
// in one backward, of this rank.
void ShardedModel::RunParameterHooks(int unit,
                                     std::vector<at::Tensor>& gradients) {
  for (size_t k = 0; k < gradients.size(); ++k) {
    Slot& slot = units_[unit].slots[k];
    if (!gradients[k].defined()) continue;
    for (const at::Tensor& tensor : slot.tensors) {
      if (!tensor.requires_grad() || !HasTensorHooks(tensor)) continue;
      if (slot.hooks_have_run) {
        ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
            "the hook on parameter ", slot.name, " cannot see the gradient of ",
            "a whole backward, which goes through several uses of unit ",
            unit_name(unit),
            ": each use is reduced by itself. Use the unit "
            "once per backward, or own the parameter in a unit around all "
            "uses (Options::wrap_policy)")));
      }
      gradients[k] = RunTensorHooks(tensor, gradients[k]);
    }
    slot.hooks_have_run = true;
  }
}

// Sequence numbers, by which autograd and this file order nodes, count per
// thread.
absl::Status ShardedModel::CheckForwardThread(int unit,
                                              std::optional<uint64_t> thread) {
  if (!thread.has_value()) return absl::OkStatus();
  const auto [it, is_new] = forward_threads_.try_emplace(GraphTask(), *thread);
  if (it->second == *thread) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "one backward through forwards of two threads, the second one of unit ",
      unit_name(unit),
      ": autograd knows the order of what one thread records, and collectives "
      "need one order. Run the forwards on one thread, or a backward for "
      "each"));
}

void ShardedModel::ForgetBackward() {
  pending_.clear();
  forward_threads_.clear();
  backward_.reset();
  for (UnitState& state : units_) {
    for (Slot& slot : state.slots) slot.hooks_have_run = false;
  }
}

absl::Status ShardedModel::PostBackward(
    int unit, const std::vector<at::Tensor>& gradients, bool reduces) {
  if (observer_ != nullptr) {
    FSDP_RETURN_IF_ERROR(observer_->BeforePostBackward(unit));
  }
  Event event{EventKind::kPostBackward, unit};
  event.reduces = reduces;
  event.synchronizes = synchronizes_;
  return TransitionOrAbort(event, gradients);
}

// Called at every event inside backward. The first one comes from the outermost
// backward: what is nested in a node of ours is announced by it, and a callback
// that is queued in a nested backward runs at the end of that one.
void ShardedModel::EnterBackward() {
  if (!backward_.expired()) return;
  GiveUpStaleBackward();
  NoteWritesBeforeBackward();
  auto under_way = std::make_shared<BackwardUnderWay>();
  under_way->model = weak_from_this();
  backward_ = under_way;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [under_way = std::move(under_way)] {
        const std::shared_ptr<ShardedModel> model = under_way->model.lock();
        if (model != nullptr) model->OnEndOfBackward();
        under_way->has_ended = true;
      });
}

// The engine has dropped the last callback of a backward that threw. Where it
// has threads of its own for a device, this may be one of them: the next event
// gives the backward up then.
void ShardedModel::OnBackwardLost() {
  if (!schedule_.in_backward() || HasStreams(runtime_->device())) return;
  GiveUpIteration(absl::OkStatus());
}

// A unit with a Unit node got no gradient, where on another rank its parameters
// may have been used: control flow inside a unit may depend on the data. This
// rank then takes part with zeros, at the place in the order of collectives
// where the other reduces. `sequence` is of the backward that runs now; one
// nested in it that has a pending unit is over.
absl::Status ShardedModel::FinishPendingFrom(uint64_t sequence) {
  const int graph_task = GraphTask();
  while (!pending_.empty() && (pending_.back().graph_task > graph_task ||
                               (pending_.back().graph_task == graph_task &&
                                pending_.back().start_sequence >= sequence))) {
    const PendingUnit pending = pending_.back();
    pending_.pop_back();
    const std::vector<at::Tensor> none(units_[pending.unit].slots.size());
    FSDP_RETURN_IF_ERROR(PostBackward(
        pending.unit, none,
        /*reduces=*/pending.has_unit_node && BackwardComputesEverything()));
  }
  return absl::OkStatus();
}

void ShardedModel::OnEndOfBackward() {
  backward_.reset();
  ThrowIfError(FinishPendingFrom(0));
  ForgetBackward();
  if (observer_ != nullptr) ThrowIfError(observer_->BeforeEndOfBackward());
  Event event{EventKind::kEndOfBackward};
  event.synchronizes = synchronizes_;
  ThrowIfError(TransitionOrAbort(event, {}));
  runtime_->EndOfBackward();
  RestoreSentinels();
  if (synchronizes_ && ReducesAll() && !std::exchange(has_reduced_, true) &&
      runtime_->communicator().rank() == 0 &&
      runtime_->hooks().step == nullptr) {
    WarnOfMissingGradients(named_shards_);
  }
  absl::Status status = CheckOrder();
  if (!status.ok()) GiveUpIteration(status);
  ThrowIfError(status);
}

// Whether a backward that reduces leaves no gradients for a later one.
bool ShardedModel::ReducesAll() const {
  for (int unit = 0; unit < num_units(); ++unit) {
    if (!schedule_.synchronizes(unit) || !schedule_.all_reduces(unit)) {
      return false;
    }
  }
  return true;
}

// Where a backend cannot see that ranks' collectives do not match, this can.
// Every reducing backward compares, since a rank whose order is as before does
// not know that another's has changed: sixteen bytes. A host that only queues
// what a device does waits for no other host either: it hears of a difference
// one backward later.
absl::Status ShardedModel::CheckOrder() {
  absl::Status status;
  if (!synchronizes_) return status;
  if (settings_.check_order && !captures_ &&
      runtime_->communicator().world_size() > 1) {
    RECORD_USER_SCOPE(absl::StrCat("fsdp::CheckOrder(", unit_name(kRoot), ")"));
    FSDP_ASSIGN_OR_RETURN(std::unique_ptr<OrderCheck> check, StartOrderCheck());
    if (HasStreams(runtime_->device())) std::swap(check, order_check_);
    if (check != nullptr) status = FinishOrderCheck(*check);
  }
  runtime_->order().Clear();
  return status;
}

absl::StatusOr<std::unique_ptr<ShardedModel::OrderCheck>>
ShardedModel::StartOrderCheck() {
  auto check = std::make_unique<OrderCheck>();
  check->order = std::exchange(runtime_->order(), OrderLog());
  // The greatest hash and, of complements, the least one.
  const int64_t bits = static_cast<int64_t>(check->order.hash());
  check->extremes = at::tensor({bits, ~bits}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(
      check->work, runtime_->communicator().AllReduce(
                       check->extremes, comm::ReduceOp::kMax, kOrderLabel));
  return check;
}

absl::Status ShardedModel::FinishOrderCheck(OrderCheck& check) {
  const absl::Time deadline = absl::Now() + runtime_->timeout();
  FSDP_RETURN_IF_ERROR(check.work->Wait(deadline));
  const int64_t* extreme = check.extremes.const_data_ptr<int64_t>();
  if (extreme[0] == ~extreme[1]) return absl::OkStatus();
  return comm::CheckSame(runtime_->communicator(), check.order.ToString(),
                         kOrderLabel, deadline);
}

}  // namespace fsdp
