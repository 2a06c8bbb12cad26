// The time and memory of a forward and backward of an unsharded model, measured
// module by module, and the same if modules are units.
#ifndef PLANNER_CHOOSE_STEP_PROFILE_H_
#define PLANNER_CHOOSE_STEP_PROFILE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/simulator/simulator.h"

namespace fsdp {

// A visit lasts from the first operator that takes a parameter of a module to
// the first that takes another module's.
struct ModuleVisit {
  int module = 0;
  double seconds = 0;
  int64_t saved = 0;  // bytes that it leaves, above all for backward
  int64_t input = 0;  // bytes that its first operator takes besides parameters
  // The most bytes alive besides those that earlier visits leave, and in its
  // backward besides those that it leaves itself; without the gradients of
  // parameters.
  int64_t working = 0;
  int64_t backward_working = 0;
};

struct StepProfile {
  std::vector<ModuleVisit> forward;  // in order
  double backward_seconds = 0;

  double forward_seconds() const;
};

// Returns the profile of `rows` rows, on the line through those of 1 and 2; if
// these visit different modules, that of 2 in proportion. Nothing is negative.
StepProfile Extrapolate(const StepProfile& one, const StepProfile& two,
                        int64_t rows);

// Runs `loss(rows)` and its backward several times: for few rows first, and for
// all of `rows` only if that fits `memory_bytes`; otherwise estimates that.
// Parameters that are deferred, or computed in another dtype than they are
// stored in, are zeros meanwhile, which take no memory on a CPU. Afterwards the
// model is as it was: values, buffers, gradients, random states. Memory is what
// LibTorch's allocators report for this thread. Errors: InvalidArgument if the
// loss is not one element that requires grad; what LibTorch throws.
absl::StatusOr<StepProfile> MeasureStep(
    const ShardPlan& plan, const std::function<at::Tensor(int64_t)>& loss,
    int64_t rows, int64_t memory_bytes);

// How a model's modules belong to units.
struct UnitMembership {
  std::vector<int> unit_of;      // by module: the innermost unit around it
  std::vector<int> parents;      // by unit; -1 for the root, unit 0
  std::vector<bool> recomputed;  // by unit: its forward is a recomputed region
};

// Returns the seconds of each unit itself. Backward is divided among units as
// forward is, and has recomputation in it.
std::vector<simulator::UnitWork> ByUnit(const StepProfile& profile,
                                        const UnitMembership& membership);

// Returns the most bytes of activations alive in a step, with the gradients
// that autograd holds until units reduce them. Backward goes through the visits
// in reverse: it frees what they saved, and holds the gradients of their
// modules until all of the unit is done. A recomputed region keeps its inputs
// and outputs, and runs its forward again when backward comes to it. Units hold
// gradients at their borders. `gradients` are the bytes of each module's
// parameters.
int64_t ActivationBytes(const StepProfile& profile,
                        const UnitMembership& membership,
                        const std::vector<int64_t>& gradients);

// Finds the ways in which a model may be divided into units.

struct Division {
  WrapPolicy wrap_policy;  // empty: the root alone
  ShardPlan plan;
  // The units directly below the root that backward may recompute; null: none.
  WrapPolicy recompute;
  UnitMembership membership;            // without recomputation
  std::vector<bool> may_be_recomputed;  // by unit

  std::string name() const;  // "root and 8"
};

// Returns divisions from all units that options.wrap_policy allows down to the
// root alone, by leaving out more and more of the smaller ones.
// options.recompute.units is asked for each unit; if it is unset, every unit
// may be recomputed. Errors are those of PlanSharding() for the first division.
absl::StatusOr<std::vector<Division>> DivisionsOf(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const Options& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_STEP_PROFILE_H_
