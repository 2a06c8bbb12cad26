#include "fsdp/model/backward_session.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/torch_status.h"

namespace fsdp {
namespace {

int GraphTask() { return torch::autograd::get_current_graph_task_id(); }

// Returns whether this backward computes all gradients rather than chosen ones.
bool BackwardComputesEverything() {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  return exec_info == nullptr || exec_info->empty();
}

}  // namespace

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
  for (std::vector<bool>& of_unit : hooks_have_run_) of_unit.clear();
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
  return Finished{last.unit,
                  last.has_unit_node && BackwardComputesEverything()};
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

bool BackwardSession::hooks_have_run(int unit, size_t parameter) const {
  const std::vector<bool>& of_unit = hooks_have_run_[unit];
  return parameter < of_unit.size() && of_unit[parameter];
}

void BackwardSession::NoteHooks(int unit, size_t parameter) {
  std::vector<bool>& of_unit = hooks_have_run_[unit];
  if (parameter >= of_unit.size()) of_unit.resize(parameter + 1);
  of_unit[parameter] = true;
}

}  // namespace fsdp
