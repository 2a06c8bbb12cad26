// The ways in which a model may be divided into units.
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
  // Of units right below the root, what backward may compute again; empty:
  // nothing.
  WrapPolicy recompute;
  UnitMembership membership;            // nothing recomputed
  std::vector<bool> may_be_recomputed;  // by unit

  std::string name() const;  // "root and 8"
};

// From all units that options.wrap_policy allows, by leaving out more and more
// of the smaller ones, to the root alone. What options.recompute says is asked
// of each unit, without one of all. Errors as PlanSharding()'s, of the first.
absl::StatusOr<std::vector<Division>> DivisionsOf(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const Options& options);

}  // namespace fsdp

#endif  // PLANNER_CHOOSE_DIVISIONS_H_
