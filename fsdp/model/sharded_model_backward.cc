// The backward of ShardedModel.
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/device_streams.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "comm/agreement.h"
#include "fsdp/model/sharded_model.h"

namespace fsdp {
namespace {

constexpr char kOrderLabel[] = "the collectives of an iteration";

int GraphTask() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace

void ShardedModel::NoteEndOfStep() {
  const std::vector<std::string> names = unused_.NoteEndOfStep(ranges_);
  if (names.empty() || runtime_->communicator().rank() != 0 ||
      runtime_->reducer().hooks().step != nullptr) {
    return;
  }
  // For example, a parameter was meant to be tied and is not.
  TORCH_WARN("fsdp: no rank has used these parameters in the first ",
             UnusedParameters::kStepsLookedAt,
             " steps, so they have no gradient and are not trained: ",
             absl::StrJoin(names, ", "),
             ". Freeze them if that is meant; tie parameters by fsdp::Tie()");
}

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
  // An earlier failure is the cause of what backward has thrown.
  absl::Status failure = TakeFailure();
  if (!failure.ok()) status = std::move(failure);
  if (status.ok()) return status;
  if (!written_before_backward_.empty() &&
      absl::StrContains(status.message(), "modified by an inplace operation")) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "backward through a forward whose parameters have changed since: "
        "shards of unit ",
        written_before_backward_,
        " were written in between, by an optimizer's step or a state dict for "
        "example. Run the backward first. LibTorch says: ",
        status.message()));
  }
  GiveUpIteration(status);
  return status;
}

void ShardedModel::EnterBackward() {
  if (backward_.is_under_way()) return;
  GiveUpStaleBackward();
  // Comes before anything that the backward reads is compared.
  written_before_backward_.clear();
  for (int unit = 0; unit < num_units(); ++unit) {
    if (NoteWrittenShards(unit)) written_before_backward_ = unit_name(unit);
  }
  NoteEndOfStep();
  const auto tell = [this](void (ShardedModel::*event)()) {
    return [weak = weak_from_this(), event] {
      const std::shared_ptr<ShardedModel> model = weak.lock();
      if (model != nullptr) (*model.*event)();
    };
  };
  backward_.Begin(tell(&ShardedModel::OnEndOfBackward),
                  tell(&ShardedModel::OnBackwardLost));
}

// The engine has dropped the last callback of a backward that threw. For a
// device this may run on one of the engine's threads, so the next event gives
// the backward up instead.
void ShardedModel::OnBackwardLost() {
  if (HasStreams(runtime_->device()) || !schedule_.in_backward()) return;
  GiveUpIteration(absl::OkStatus());
}

void ShardedModel::OnPreBackward(const PreBackwardInfo& info) {
  ThrowIfError(CheckNoWholeAccess());
  EnterBackward();
  ThrowIfError(
      backward_.CheckForwardThread(unit_name(info.unit), info.forward_thread));
  if (observer_ != nullptr) {
    ThrowIfError(observer_->BeforePreBackward(info.unit));
  }
  ThrowIfError(precision_.CheckGraph(info.unit, unit_name(info.unit),
                                     info.in_full_precision));
  ThrowIfError(FinishPendingFrom(info.exit_sequence));
  ThrowIfError(TransitionOrGiveUp({EventKind::kPreBackward, info.unit}, {}));
  if (info.start_sequence.has_value()) {
    backward_.AddPending(info.unit, *info.start_sequence, info.has_unit_node);
  }
}

void ShardedModel::OnPostBackward(const PostBackwardInfo& info,
                                  std::vector<at::Tensor> gradients) {
  EnterBackward();
  ThrowIfError(
      backward_.CheckForwardThread(unit_name(info.unit), info.forward_thread));
  ThrowIfError(FinishPendingFrom(info.node_sequence + 1));
  backward_.RemovePending(info.unit, info.node_sequence);
  RunParameterHooks(info.unit, gradients);
  ThrowIfError(
      PostBackward(info.unit, gradients, /*reduces=*/!gradients.empty()));
}

void ShardedModel::OnLeft(uint64_t start_sequence) {
  ThrowIfError(FinishPendingFrom(start_sequence));
}

// Reduces units with a Unit node that got no gradient. Other ranks may have
// used their parameters, because control flow may depend on data: this rank
// joins with zeros at the place where they reduce. `sequence` is the running
// node's.
absl::Status ShardedModel::FinishPendingFrom(uint64_t sequence) {
  while (const auto pending = backward_.TakePendingFrom(sequence)) {
    const std::vector<at::Tensor> none(
        units_[pending->unit].parameters.slots().size());
    FSDP_RETURN_IF_ERROR(PostBackward(pending->unit, none, pending->reduces));
  }
  return absl::OkStatus();
}

// A hook must see what it would see without sharding: this rank's sum over all
// uses in one backward.
void ShardedModel::RunParameterHooks(int unit,
                                     std::vector<at::Tensor>& gradients) {
  for (size_t k = 0; k < gradients.size(); ++k) {
    const UnitParameters::Slot& slot = units_[unit].parameters.slots()[k];
    if (!gradients[k].defined()) continue;
    for (const at::Tensor& tensor : slot.tensors) {
      if (!tensor.requires_grad() || !HasTensorHooks(tensor)) continue;
      if (backward_.hooks_have_run(unit, k)) {
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
    backward_.NoteHooks(unit, k);
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
  return TransitionOrGiveUp(event, gradients);
}

void ShardedModel::OnEndOfBackward() {
  backward_.Leave();
  ThrowIfError(FinishPendingFrom(0));
  backward_.Forget();
  if (observer_ != nullptr) ThrowIfError(observer_->BeforeEndOfBackward());
  Event event{EventKind::kEndOfBackward};
  event.synchronizes = synchronizes_;
  ThrowIfError(TransitionOrGiveUp(event, {}));
  runtime_->reducer().EndOfBackward();
  RestoreSentinels();
  // Does the backward leave no gradients for a later one?
  bool reduces_all = synchronizes_;
  for (int unit = 0; unit < num_units(); ++unit) {
    reduces_all &= schedule_.synchronizes(unit) && schedule_.all_reduces(unit);
  }
  if (reduces_all) unused_.NoteGradients(ranges_);
  absl::Status status = CheckOrder();
  if (!status.ok()) GiveUpIteration(status);
  ThrowIfError(status);
}

absl::Status ShardedModel::CheckOrder() {
  absl::Status status;
  if (!synchronizes_) return status;
  if (settings_.check_order && !captures_ &&
      runtime_->communicator().world_size() > 1) {
    RECORD_USER_SCOPE(absl::StrCat("fsdp::CheckOrder(", unit_name(kRoot), ")"));
    status = order_check_.Compare(std::exchange(runtime_->order(), OrderLog()));
  }
  runtime_->order().Clear();
  return status;
}

struct BackwardSession::UnderWay {
  ~UnderWay() {
    if (has_ended) return;
    TorchToStatus("giving a backward up", on_lost).IgnoreError();
  }

  std::function<void()> on_lost;
  bool has_ended = false;
};

// Must be called by the outermost backward: a callback that is queued in a
// nested one runs at that one's end. The first event is never nested: a node of
// ours announces the backward that is nested in it.
void BackwardSession::Begin(std::function<void()> on_end,
                            std::function<void()> on_lost) {
  auto under_way = std::make_shared<UnderWay>();
  under_way->on_lost = std::move(on_lost);
  under_way_ = under_way;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [under_way = std::move(under_way), on_end = std::move(on_end)] {
        on_end();
        under_way->has_ended = true;
      });
}

void BackwardSession::Forget() {
  pending_.clear();
  forward_threads_.clear();
  under_way_.reset();
  hooks_have_run_.clear();
}

void BackwardSession::AddPending(int unit, uint64_t start_sequence,
                                 bool has_unit_node) {
  pending_.push_back({unit, GraphTask(), start_sequence, has_unit_node});
}

void BackwardSession::RemovePending(int unit, uint64_t start_sequence) {
  while (!pending_.empty() && pending_.back().unit == unit &&
         pending_.back().start_sequence == start_sequence) {
    pending_.pop_back();
  }
}

std::optional<BackwardSession::Finished> BackwardSession::TakePendingFrom(
    uint64_t sequence) {
  if (pending_.empty()) return std::nullopt;
  const Pending last = pending_.back();
  const int graph_task = GraphTask();
  if (last.graph_task < graph_task ||
      (last.graph_task == graph_task && last.start_sequence < sequence)) {
    return std::nullopt;
  }
  pending_.pop_back();
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  const bool computes_all = exec_info == nullptr || exec_info->empty();
  return Finished{last.unit, last.has_unit_node && computes_all};
}

absl::Status BackwardSession::CheckForwardThread(
    const std::string& unit, std::optional<uint64_t> thread) {
  if (!thread.has_value()) return absl::OkStatus();
  const auto [it, is_new] = forward_threads_.try_emplace(GraphTask(), *thread);
  if (it->second == *thread) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "one backward through forwards of two threads, the second one of unit ",
      unit,
      ": autograd knows the order of what one thread records, and collectives "
      "need one order. Run the forwards on one thread, or a backward for "
      "each"));
}

absl::Status OrderCheck::Compare(OrderLog order) {
  auto comparison = std::make_unique<Comparison>();
  comparison->order = std::move(order);
  // The maxima over the ranks are the greatest hash and the complement of the
  // least.
  const int64_t bits = static_cast<int64_t>(comparison->order.hash());
  comparison->extremes = at::tensor({bits, ~bits}, at::kLong);
  FSDP_ASSIGN_OR_RETURN(
      comparison->work,
      communicator_.AllReduce(comparison->extremes, comm::ReduceOp::kMax,
                              kOrderLabel));
  if (lags_) std::swap(comparison, under_way_);
  return comparison == nullptr ? absl::OkStatus() : Finish(*comparison);
}

absl::Status OrderCheck::Finish() {
  if (under_way_ == nullptr) return absl::OkStatus();
  const auto comparison = std::exchange(under_way_, nullptr);
  return Finish(*comparison);
}

absl::Status OrderCheck::Finish(Comparison& comparison) {
  const absl::Time deadline = absl::Now() + timeout_;
  FSDP_RETURN_IF_ERROR(comparison.work->Wait(deadline));
  const int64_t* extreme = comparison.extremes.const_data_ptr<int64_t>();
  if (extreme[0] == ~extreme[1]) return absl::OkStatus();
  return comm::CheckSame(communicator_, comparison.order.ToString(),
                         kOrderLabel, deadline);
}

}  // namespace fsdp
