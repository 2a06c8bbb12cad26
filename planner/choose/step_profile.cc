#include "planner/choose/step_profile.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {
namespace {

// Returns the value at `rows` of the line through those at 1 and 2 rows.
template <typename T>
T Line(T one, T two, int64_t rows) {
  return std::max<T>(0, one + (two - one) * static_cast<T>(rows - 1));
}

// Returns the outermost recomputed unit among `unit` and its parents, -1 if
// there is none.
int RegionAround(const UnitMembership& membership, int unit) {
  int region = -1;
  for (; unit >= 0; unit = membership.parents[unit]) {
    if (membership.recomputed[unit]) region = unit;
  }
  return region;
}

// Backward of a unit below the root holds more at its border than that of a
// plain module does, in multiples of its input: the gradient of its output, and
// for a recomputed unit also its input's gradient and its output.
constexpr int64_t kAtBorder = 1;
constexpr int64_t kAtBorderOfRegion = 3;

// Follows the memory of a step visit by visit.
class StepMemory {
 public:
  StepMemory(const StepProfile& profile, const UnitMembership& membership,
             const std::vector<int64_t>& gradients)
      : visits_(profile.forward),
        membership_(membership),
        gradients_(gradients),
        kept_(visits_.size()),
        is_open_(membership.parents.size()),
        border_(membership.parents.size()),
        held_(membership.parents.size()),
        left_(membership.parents.size()) {
    for (const ModuleVisit& visit : visits_) {
      const int unit = membership.unit_of[visit.module];
      regions_.push_back(RegionAround(membership, unit));
      for (int each = unit; each >= 0; each = membership.parents[each]) {
        if (left_[each]++ > 0 || membership.parents[each] != 0) continue;
        border_[each] =
            visit.input *
            (membership.recomputed[each] ? kAtBorderOfRegion : kAtBorder);
      }
    }
  }

  int64_t Peak() {
    for (size_t i = 0; i < visits_.size(); ++i) Forward(i);
    for (size_t i = visits_.size(); i-- > 0;) Backward(i);
    return peak_;
  }

 private:
  void Forward(size_t i) {
    if (regions_[i] < 0) kept_[i] = visits_[i].saved;
    // The output of a region stays, and the region does not count it. The
    // output of another visit is part of what that visit has saved.
    const bool comes_out = i > 0 && regions_[i - 1] >= 0;
    if (comes_out && regions_[i] != regions_[i - 1]) {
      kept_[i] += visits_[i].input;
    }
    peak_ = std::max(peak_, live_ + visits_[i].working);
    live_ += kept_[i];
  }

  void Backward(size_t i) {
    const ModuleVisit& visit = visits_[i];
    const int unit = membership_.unit_of[visit.module];
    for (int each = unit; each >= 0; each = membership_.parents[each]) {
      const int64_t border = std::exchange(border_[each], 0);
      held_[each] += border;
      live_ += border;
    }
    if (regions_[i] >= 0) OpenRegion(regions_[i]);
    // All uses of a parameter add to one gradient.
    const int64_t gradient = std::exchange(gradients_[visit.module], 0);
    held_[unit] += gradient;
    live_ += gradient;
    peak_ = std::max(peak_, live_ + visit.backward_working);
    if (regions_[i] >= 0) live_ -= visit.saved;
    live_ -= kept_[i];
    // The gradients of a unit are reduced after its last visit.
    for (int each = unit; each >= 0; each = membership_.parents[each]) {
      if (--left_[each] == 0) live_ -= std::exchange(held_[each], 0);
    }
  }

  // Runs forward of the region again, which saves.
  void OpenRegion(int region) {
    if (is_open_[region]) return;
    is_open_[region] = true;
    for (size_t i = 0; i < visits_.size(); ++i) {
      if (regions_[i] != region) continue;
      peak_ = std::max(peak_, live_ + visits_[i].working);
      live_ += visits_[i].saved;
    }
  }

  const std::vector<ModuleVisit>& visits_;
  const UnitMembership& membership_;
  std::vector<int64_t> gradients_;  // by module, until backward reaches it
  std::vector<int> regions_;        // by visit; -1: none
  std::vector<int64_t> kept_;       // by visit, from forward to backward
  std::vector<bool> is_open_;       // by unit; only for recomputed ones
  std::vector<int64_t> border_;     // by unit, until its backward begins
  std::vector<int64_t> held_;       // by unit, until it is reduced
  std::vector<int> left_;  // by unit: visits to come of it and of units inside
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

}  // namespace

double StepProfile::forward_seconds() const {
  double sum = 0;
  for (const ModuleVisit& visit : forward) sum += visit.seconds;
  return sum;
}

StepProfile Extrapolate(const StepProfile& one, const StepProfile& two,
                        int64_t rows) {
  const bool same = absl::c_equal(
      one.forward, two.forward, [](const ModuleVisit& a, const ModuleVisit& b) {
        return a.module == b.module;
      });
  StepProfile result = two;
  // Where 1 row says nothing, the line goes through 0 and 2 rows.
  const auto at = [&](auto of_one, auto of_two) {
    return same ? Line(of_one, of_two, rows) : Line(of_two / 2, of_two, rows);
  };
  for (size_t i = 0; i < two.forward.size(); ++i) {
    const ModuleVisit& a = same ? one.forward[i] : two.forward[i];
    const ModuleVisit& b = two.forward[i];
    ModuleVisit& visit = result.forward[i];
    visit.seconds = at(a.seconds, b.seconds);
    visit.saved = at(a.saved, b.saved);
    visit.input = at(a.input, b.input);
    visit.working = at(a.working, b.working);
    visit.backward_working = at(a.backward_working, b.backward_working);
  }
  result.backward_seconds = at(one.backward_seconds, two.backward_seconds);
  return result;
}

std::vector<simulator::UnitWork> ByUnit(const StepProfile& profile,
                                        const UnitMembership& membership) {
  const size_t count = membership.parents.size();
  std::vector<simulator::UnitWork> units(count);
  std::vector<bool> has_children_behind(count);
  for (const ModuleVisit& visit : profile.forward) {
    const int index = membership.unit_of[visit.module];
    units[index].forward.seconds += visit.seconds;
    if (!has_children_behind[index]) units[index].share_before += visit.seconds;
    int around = membership.parents[index];
    for (; around >= 0; around = membership.parents[around]) {
      has_children_behind[around] = true;
    }
  }
  const double forward = profile.forward_seconds();
  for (int i = 0; i < static_cast<int>(count); ++i) {
    const double own = units[i].forward.seconds;
    if (own == 0) continue;
    units[i].share_before /= own;
    double& backward = units[i].backward.seconds;
    backward = profile.backward_seconds * own / forward;
    if (RegionAround(membership, i) >= 0) backward += own;
  }
  return units;
}

int64_t ActivationBytes(const StepProfile& profile,
                        const UnitMembership& membership,
                        const std::vector<int64_t>& gradients) {
  FSDP_CHECK(gradients.size() == membership.unit_of.size());
  return StepMemory(profile, membership, gradients).Peak();
}

namespace {

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
  // More thresholds would cost time and would hardly find better options.
  constexpr size_t kMostThresholds = 4;
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
    policies.emplace_back(
        [policy = options.wrap_policy, least](const WrapCandidate& candidate) {
          return candidate.unowned_numel >= least && policy(candidate);
        });
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
    const bool is_new =
        absl::c_none_of(divisions, [&units](const Division& other) {
          return ModulesOfUnits(other.plan) == units;
        });
    if (is_new) divisions.push_back(std::move(division));
  }
  return divisions;
}

}  // namespace fsdp
