#include "fsdp/autograd/checkpoint_scope.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

thread_local RunningUnits units_under_way;
thread_local RegionScope* current_region = nullptr;
thread_local RecomputeScope* current_recomputation = nullptr;

}  // namespace

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
    const bool is_kept = std::any_of(
        kept_.begin(), kept_.end(),
        [&](const auto& kept) { return kept.first.is_same(buffer); });
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
