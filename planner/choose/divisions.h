// Finds the ways in which a model may be divided into units.
#ifndef PLANNER_CHOOSE_DIVISIONS_H_
#define PLANNER_CHOOSE_DIVISIONS_H_

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/setup/shard_plan.h"
#include "planner/choose/step_profile.h"

namespace fsdp {

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

#endif  // PLANNER_CHOOSE_DIVISIONS_H_
