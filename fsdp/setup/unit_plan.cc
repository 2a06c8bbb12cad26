#include "fsdp/setup/unit_plan.h"

#include <cstddef>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/check.h"

namespace fsdp {
namespace {

constexpr int kNone = -1;

// A module with all its places in the tree.
struct ModuleObject {
  int first_node;
  bool is_unit;
  std::vector<int> parents;   // objects, one entry per place; none for the root
  std::vector<int> children;  // the same edges from the other end
};

// The module tree with all places of a module merged: an acyclic graph with
// one root, object 0. Objects are in the order of their first places.
struct ModuleGraph {
  std::vector<ModuleObject> objects;
  std::vector<int> object_of_node;
};

// Finds the units that surround an object: those through which every way from
// the root to it passes, so that they run whenever it runs. They form a chain.
class UnitTree {
 public:
  explicit UnitTree(const ModuleGraph& graph)
      : graph_(graph),
        surrounding_(graph.objects.size(), kNone),
        depth_(graph.objects.size(), 0) {}

  // Must be called for each object after its parents.
  void Add(int object) {
    int unit = kNone;
    for (const int parent : graph_.objects[object].parents) {
      unit = unit == kNone ? Innermost(parent)
                           : LowestCommon(unit, Innermost(parent));
    }
    surrounding_[object] = unit;
    depth_[object] = unit == kNone ? 0 : depth_[unit] + 1;
  }

  // Returns the innermost unit around `object` other than itself; kNone for the
  // root.
  int Surrounding(int object) const { return surrounding_[object]; }

  int Innermost(int object) const {
    return graph_.objects[object].is_unit ? object : surrounding_[object];
  }

  // Returns the innermost unit that is or surrounds both units.
  int LowestCommon(int a, int b) const {
    while (a != b) {
      int& deeper = depth_[a] >= depth_[b] ? a : b;
      deeper = surrounding_[deeper];
    }
    return a;
  }

 private:
  const ModuleGraph& graph_;
  std::vector<int> surrounding_;
  std::vector<int> depth_;  // number of surrounding units
};

ModuleGraph MergePlaces(absl::Span<const ModuleNode> modules) {
  FSDP_CHECK(!modules.empty() && modules[0].parent == kNone &&
             modules[0].is_unit);
  ModuleGraph graph;
  graph.object_of_node.reserve(modules.size());
  absl::flat_hash_map<int, int> object_of_identity;
  for (int i = 0; i < static_cast<int>(modules.size()); ++i) {
    const ModuleNode& node = modules[i];
    const int next = static_cast<int>(graph.objects.size());
    const auto [entry, is_new] =
        object_of_identity.try_emplace(node.identity, next);
    const int object = entry->second;
    if (is_new) graph.objects.push_back({i, node.is_unit, {}, {}});
    FSDP_CHECK(graph.objects[object].is_unit == node.is_unit);
    graph.object_of_node.push_back(object);
    if (node.parent == kNone) continue;
    const int parent = graph.object_of_node[node.parent];
    graph.objects[object].parents.push_back(parent);
    graph.objects[parent].children.push_back(object);
  }
  return graph;
}

// Fills `tree`, parents first.
void AddAll(const ModuleGraph& graph, UnitTree& tree) {
  std::vector<size_t> missing_parents;
  missing_parents.reserve(graph.objects.size());
  for (const ModuleObject& object : graph.objects) {
    missing_parents.push_back(object.parents.size());
  }
  std::vector<int> ready = {0};
  while (!ready.empty()) {
    const int object = ready.back();
    ready.pop_back();
    tree.Add(object);
    for (const int child : graph.objects[object].children) {
      if (--missing_parents[child] == 0) ready.push_back(child);
    }
  }
}

}  // namespace

absl::StatusOr<std::vector<Unit>> PlanUnits(
    absl::Span<const ModuleNode> modules, absl::Span<const ParameterUse> uses) {
  if (uses.empty()) {
    return absl::InvalidArgumentError(
        "the model has no parameters, so there is nothing to shard; register "
        "its parameters and submodules before wrapping it");
  }
  const ModuleGraph graph = MergePlaces(modules);
  UnitTree tree(graph);
  AddAll(graph, tree);

  std::vector<Unit> units;
  std::vector<int> unit_of_object(graph.objects.size(), kNone);
  for (int i = 0; i < static_cast<int>(graph.objects.size()); ++i) {
    const ModuleObject& object = graph.objects[i];
    if (!object.is_unit) continue;
    unit_of_object[i] = static_cast<int>(units.size());
    const int around = tree.Surrounding(i);
    units.push_back({modules[object.first_node].path,
                     object.first_node,
                     around == kNone ? kNone : unit_of_object[around],
                     {}});
  }

  // Distinct parameters, in the order of their first use, with their owners.
  std::vector<std::pair<OwnedParameter, int>> owned;
  absl::flat_hash_map<int, size_t> index_of;
  for (const ParameterUse& use : uses) {
    const int unit = tree.Innermost(graph.object_of_node[use.module]);
    const auto [entry, is_new] =
        index_of.try_emplace(use.parameter, owned.size());
    if (is_new) owned.push_back({{use.parameter, {}}, unit});
    auto& [parameter, owner] = owned[entry->second];
    parameter.names.push_back(use.name);
    owner = tree.LowestCommon(owner, unit);
  }
  for (auto& [parameter, owner] : owned) {
    units[unit_of_object[owner]].parameters.push_back(std::move(parameter));
  }
  return units;
}

std::string DisplayName(const Unit& unit) {
  return unit.parent == kNone ? "root" : unit.name;
}

}  // namespace fsdp
