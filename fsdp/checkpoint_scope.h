// What checkpointed regions and units that run around and inside them know of
// each other. Per thread: a forward, or its recomputation, runs on one.
#ifndef FSDP_CHECKPOINT_SCOPE_H_
#define FSDP_CHECKPOINT_SCOPE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/autograd.h"

namespace fsdp {

// A unit whose forward is under way with grad: the code that runs in it may use
// its parameters.
struct RunningUnit {
  std::string name;
  ParameterSlots trainable;
  // Some parameters of its modules belong to no unit.
  bool may_use_other_parameters = false;
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
// is, although the backward around it may run inside another forward.
class RecomputeScope {
 public:
  explicit RecomputeScope(RunningUnits units);
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;
  ~RecomputeScope();

 private:
  RunningUnits units_;
  RegionScope* region_ = nullptr;
};

}  // namespace fsdp

#endif  // FSDP_CHECKPOINT_SCOPE_H_
