// What checkpointed regions and units that run around and inside them know of
// each other. Per thread: a forward, or its recomputation, runs on one.
#ifndef FSDP_AUTOGRAD_CHECKPOINT_SCOPE_H_
#define FSDP_AUTOGRAD_CHECKPOINT_SCOPE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/autograd/autograd.h"

namespace fsdp {

// A unit whose forward is under way with grad: the code that runs in it may use
// its parameters.
struct RunningUnit {
  std::string name;
  ParameterSlots trainable;
  // Some parameters of its modules belong to no unit.
  bool may_use_other_parameters = false;
  // Of its modules; never null.
  std::shared_ptr<const std::vector<at::Tensor>> buffers;
};
using RunningUnits = std::vector<std::shared_ptr<const RunningUnit>>;

// Outermost first.
const RunningUnits& UnitsUnderWay();

// Adds a unit to UnitsUnderWay() for as long as it lives.
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
  // Whether the region is to be recomputed, and whether a gradient flows
  // through an argument, as far as is known.
  RegionScope(bool requires_grad, bool arguments_require_grad);
  RegionScope(const RegionScope&) = delete;
  RegionScope& operator=(const RegionScope&) = delete;
  ~RegionScope();

  // The innermost one under way on this thread, or null.
  static RegionScope* Current();

  // A unit with trainable parameters runs inside.
  void NoteTrainable() { requires_grad_ = passes_grad_ = true; }

  bool requires_grad() const { return requires_grad_; }
  // Whether the recomputation of what has run last is sure to have a backward.
  bool passes_grad() const { return passes_grad_; }

 private:
  bool requires_grad_;
  bool passes_grad_;
  RegionScope* const outer_;
};

// The recomputation of a region: `units` are under way again and nothing else
// is, although the backward around it may run inside another forward. What it
// changes in buffers of those units, and of units that run inside it, is taken
// back where `restores_buffers`: it is one forward, not two.
class RecomputeScope {
 public:
  RecomputeScope(RunningUnits units, bool restores_buffers);
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  ~RecomputeScope();

  // The innermost one under way on this thread, or null.
  static RecomputeScope* Current();

  // Before `buffers` may be changed.
  void KeepBuffers(const std::vector<at::Tensor>& buffers);

  // When the function has run again, and before what it has recorded is used:
  // calls what was given to AtEnd(), the last one first.
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

#endif  // FSDP_AUTOGRAD_CHECKPOINT_SCOPE_H_
