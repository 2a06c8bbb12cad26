// Tells checkpointed regions, and units around and inside them, of each other,
// per thread: a forward or its recomputation runs on one.
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

#endif  // FSDP_AUTOGRAD_CHECKPOINT_SCOPE_H_
