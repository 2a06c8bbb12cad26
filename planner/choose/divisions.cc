#include "planner/choose/divisions.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "comm/mesh.h"
#include "fsdp/options/options.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/shard_plan.h"
#include "fsdp/setup/unit_plan.h"
#include "planner/choose/step_profile.h"

namespace fsdp {
namespace {

// More thresholds would cost time and would hardly find better options.
constexpr size_t kMostThresholds = 4;

WrapPolicy AtLeast(const WrapPolicy& policy, int64_t least) {
  if (least == 0) return policy;
  return [policy, least](const WrapCandidate& candidate) {
    return candidate.unowned_numel >= least && policy(candidate);
  };
}

UnitMembership MembershipOf(const ShardPlan& plan) {
  const std::vector<ModuleNode>& nodes = plan.tree.nodes;
  std::map<int, int> unit_of_identity;
  UnitMembership membership;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    unit_of_identity[nodes[plan.units[i].unit.module].identity] =
        static_cast<int>(i);
    membership.parents.push_back(plan.units[i].unit.parent);
  }
  for (const ModuleNode& node : nodes) {
    const auto own = unit_of_identity.find(node.identity);
    membership.unit_of.push_back(own != unit_of_identity.end() ? own->second
                                 : node.parent < 0
                                     ? 0
                                     : membership.unit_of[node.parent]);
  }
  membership.recomputed.assign(plan.units.size(), false);
  return membership;
}

// The policy of the division names these units by their paths.
void FindRecomputable(const WrapPolicy& policy, Division& division) {
  const ShardPlan& plan = division.plan;
  std::set<std::string> paths;
  for (const PlannedUnit& planned : plan.units) {
    const int node = planned.unit.module;
    const bool may =
        planned.unit.parent == 0 &&
        (!policy ||
         policy({plan.tree.nodes[node].path, *plan.tree.modules[node],
                 plan.tree.unowned_numel[node], /*is_unit=*/true}));
    division.may_be_recomputed.push_back(may);
    if (may) paths.insert(plan.tree.nodes[node].path);
  }
  if (paths.empty()) return;
  division.recompute = [paths](const WrapCandidate& candidate) {
    return candidate.is_unit && paths.count(candidate.path) > 0;
  };
}

absl::StatusOr<Division> MakeDivision(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    Options options, WrapPolicy wrap_policy) {
  const WrapPolicy recompute = std::exchange(options.recompute.units, nullptr);
  options.wrap_policy = wrap_policy;
  Division division;
  division.wrap_policy = std::move(wrap_policy);
  FSDP_ASSIGN_OR_RETURN(division.plan, PlanSharding(module, mesh, options));
  division.membership = MembershipOf(division.plan);
  FindRecomputable(recompute, division);
  return division;
}

// Each threshold leaves out the units up to one of the sizes. The largest size
// is not used: it would leave the root alone.
std::vector<int64_t> ThresholdsOf(const ShardPlan& plan) {
  std::set<int64_t> sizes;
  for (size_t i = 1; i < plan.units.size(); ++i) {
    sizes.insert(plan.tree.unowned_numel[plan.units[i].unit.module]);
  }
  const std::vector<int64_t> sorted(sizes.begin(), sizes.end());
  std::vector<int64_t> thresholds;
  const size_t count = sorted.empty() ? 0 : sorted.size() - 1;
  const size_t taken = std::min(count, kMostThresholds);
  for (size_t i = 0; i < taken; ++i) {
    thresholds.push_back(sorted[i * count / taken] + 1);
  }
  return thresholds;
}

std::vector<int> ModulesOfUnits(const ShardPlan& plan) {
  std::vector<int> modules;
  modules.reserve(plan.units.size());
  for (const PlannedUnit& planned : plan.units) {
    modules.push_back(planned.unit.module);
  }
  return modules;
}

}  // namespace

std::string Division::name() const {
  if (plan.units.size() == 1) return "root alone";
  return absl::StrCat("root and ", plan.units.size() - 1);
}

absl::StatusOr<std::vector<Division>> DivisionsOf(
    const std::shared_ptr<torch::nn::Module>& module, const comm::Mesh& mesh,
    const Options& options) {
  std::vector<Division> divisions;
  FSDP_ASSIGN_OR_RETURN(
      divisions.emplace_back(),
      MakeDivision(module, mesh, options, options.wrap_policy));
  std::vector<WrapPolicy> policies;
  for (const int64_t least : ThresholdsOf(divisions.front().plan)) {
    policies.push_back(AtLeast(options.wrap_policy, least));
  }
  if (divisions.front().plan.units.size() > 1) policies.emplace_back();
  // The first plan refers to all parameters, which a check of the others would
  // take for an outside reference.
  Options checked = options;
  checked.checks.outside_references = false;
  for (WrapPolicy& policy : policies) {
    FSDP_ASSIGN_OR_RETURN(Division division, MakeDivision(module, mesh, checked,
                                                          std::move(policy)));
    const std::vector<int> units = ModulesOfUnits(division.plan);
    const bool is_new = std::none_of(
        divisions.begin(), divisions.end(), [&units](const Division& other) {
          return ModulesOfUnits(other.plan) == units;
        });
    if (is_new) divisions.push_back(std::move(division));
  }
  return divisions;
}

}  // namespace fsdp
