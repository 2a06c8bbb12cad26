#include "fsdp/setup/unit_plan.h"

#include <cstddef>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

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

std::string Quoted(const ModuleNode& node) {
  return absl::StrCat("module '", node.path, "'");
}

absl::Status Malformed(absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("planning units: malformed module tree: ", why));
}

// Checks that `modules` are a tree in pre-order whose root is a unit.
absl::Status CheckTree(absl::Span<const ModuleNode> modules) {
  if (modules.empty()) return Malformed("it has no modules");
  if (modules[0].parent != kNone) return Malformed("the root has a parent");
  if (!modules[0].is_unit) return Malformed("the root is not a unit");
  std::vector<int> way = {0};  // from the root to the node before
  for (int i = 1; i < static_cast<int>(modules.size()); ++i) {
    while (!way.empty() && way.back() != modules[i].parent) way.pop_back();
    if (way.empty()) {
      return Malformed(absl::StrCat(Quoted(modules[i]), " has parent ",
                                    modules[i].parent,
                                    ", which breaks the pre-order"));
    }
    way.push_back(i);
  }
  return absl::OkStatus();
}

absl::StatusOr<ModuleGraph> MergePlaces(absl::Span<const ModuleNode> modules) {
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
    if (graph.objects[object].is_unit != node.is_unit) {
      const ModuleNode& first = modules[graph.objects[object].first_node];
      return Malformed(absl::StrCat(Quoted(first), " and ", Quoted(node),
                                    " are one module, but only one of them is "
                                    "a unit"));
    }
    graph.object_of_node.push_back(object);
    if (node.parent == kNone) continue;
    const int parent = graph.object_of_node[node.parent];
    graph.objects[object].parents.push_back(parent);
    graph.objects[parent].children.push_back(object);
  }
  return graph;
}

// Fills `tree`, parents first. Fails if a module is inside itself.
absl::Status AddAll(const ModuleGraph& graph,
                    absl::Span<const ModuleNode> modules, UnitTree& tree) {
  std::vector<size_t> missing_parents;
  missing_parents.reserve(graph.objects.size());
  for (const ModuleObject& object : graph.objects) {
    missing_parents.push_back(object.parents.size());
  }
  std::vector<int> ready;
  if (missing_parents[0] == 0) ready.push_back(0);
  while (!ready.empty()) {
    const int object = ready.back();
    ready.pop_back();
    tree.Add(object);
    for (const int child : graph.objects[object].children) {
      if (--missing_parents[child] == 0) ready.push_back(child);
    }
  }
  for (size_t i = 0; i < graph.objects.size(); ++i) {
    if (missing_parents[i] == 0) continue;
    return Malformed(
        absl::StrCat(Quoted(modules[graph.objects[i].first_node]),
                     " contains itself or is part of a module that does"));
  }
  return absl::OkStatus();
}

absl::Status CheckUses(absl::Span<const ParameterUse> uses, int num_modules) {
  if (uses.empty()) {
    return absl::InvalidArgumentError(
        "the model has no parameters, so there is nothing to shard; register "
        "its parameters and submodules before wrapping it");
  }
  absl::flat_hash_set<absl::string_view> names;
  for (const ParameterUse& use : uses) {
    if (use.module < 0 || use.module >= num_modules) {
      return absl::InvalidArgumentError(
          absl::StrCat("planning units: parameter '", use.name,
                       "' is registered in unknown module ", use.module));
    }
    if (!names.insert(use.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "planning units: parameter '", use.name, "' is listed twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<Unit>> PlanUnits(
    absl::Span<const ModuleNode> modules, absl::Span<const ParameterUse> uses) {
  FSDP_RETURN_IF_ERROR(CheckTree(modules));
  FSDP_RETURN_IF_ERROR(CheckUses(uses, static_cast<int>(modules.size())));
  FSDP_ASSIGN_OR_RETURN(const ModuleGraph graph, MergePlaces(modules));
  UnitTree tree(graph);
  FSDP_RETURN_IF_ERROR(AddAll(graph, modules, tree));

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
