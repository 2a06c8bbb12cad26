#include "fsdp/setup/unit_plan.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <cstddef>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/fnv1a.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "flat_param/flat_parameter.h"
#include "flat_param/guarded_storage.h"
#include "flat_param/module_walk.h"
#include "fsdp/autograd/autograd.h"
#include "fsdp/deferred/deferred_tensor.h"

namespace fsdp {
namespace {

using ::torch::nn::Module;

absl::Status CheckParameter(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", name, " is undefined"));
  }
  if (tensor.layout() != c10::kStrided || tensor.is_quantized() ||
      tensor.is_meta() || !tensor.has_storage()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", name, " has no dense memory of its own (",
                     c10::toString(tensor.scalar_type()),
                     tensor.is_meta() ? ", on the meta device" : "",
                     "): only dense tensors can be sharded"));
  }
  // LibTorch itself refuses byte tensors that require a gradient.
  if (!c10::isFloatingType(tensor.scalar_type()) &&
      tensor.scalar_type() != c10::kByte) {
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter ", name, " has dtype ", c10::toString(tensor.scalar_type()),
        ": only floating-point parameters can be sharded, and bytes (Byte), "
        "which are frozen. Register it as a buffer, or its bytes, "
        "view(torch::kByte)"));
  }
  if (HasOurEdge(tensor) || flat_param::IsGuarded(tensor.storage())) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter ", name,
                     " already belongs to a unit of a sharded model: shard "
                     "the outermost module, once, and choose the units inside "
                     "it by Options::wrap_policy. If sharding it has failed "
                     "half-way, make a new one"));
  }
  return absl::OkStatus();
}

class Reader {
 public:
  explicit Reader(const Options& options) : options_(options) {}

  // Returns the elements below `module` that no unit below it owns.
  absl::StatusOr<int64_t> Read(const std::shared_ptr<Module>& module,
                               const std::string& path, int parent) {
    const int index = static_cast<int>(tree_.nodes.size());
    tree_.nodes.push_back({path, parent, parent == -1, Identity(*module)});
    tree_.modules.push_back(module);
    tree_.unowned_numel.push_back(0);
    FSDP_ASSIGN_OR_RETURN(int64_t unowned,
                          ReadOwnParameters(*module, path, index));
    for (const auto& child : module->named_children()) {
      const std::string child_path = flat_param::JoinName(path, child.key());
      if (options_.ignore.module &&
          options_.ignore.module(child_path, *child.value())) {
        continue;
      }
      FSDP_ASSIGN_OR_RETURN(const int64_t below,
                            Read(child.value(), child_path, index));
      unowned += below;
    }
    tree_.unowned_numel[index] = unowned;
    if (parent == -1 || !IsWanted(*module, path, unowned)) return unowned;
    tree_.nodes[index].is_unit = true;
    return 0;
  }

  // Fails if parameters overlap without being the same view.
  absl::StatusOr<ModuleTree> Take() {
    FSDP_RETURN_IF_ERROR(ties_.CheckOverlaps("sharding"));
    for (flat_param::NamedParameter& parameter : ties_.Take()) {
      tree_.parameters.push_back(std::move(parameter.tensors));
    }
    return std::move(tree_);
  }

 private:
  // Asks about a module once, even if it has several places, which must agree.
  bool IsWanted(const Module& module, const std::string& path,
                int64_t unowned) {
    if (!options_.wrap_policy || !CanBeUnit(module)) return false;
    const auto [it, is_new] = wanted_.try_emplace(&module, false);
    if (is_new)
      it->second = options_.wrap_policy(WrapCandidate{path, module, unowned});
    return it->second;
  }

  int Identity(const Module& module) {
    return identities_.try_emplace(&module, identities_.size()).first->second;
  }

  absl::StatusOr<int64_t> ReadOwnParameters(const Module& module,
                                            const std::string& path,
                                            int index) {
    int64_t numel = 0;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const std::string name = flat_param::JoinName(path, item.key());
      if (options_.ignore.parameter &&
          options_.ignore.parameter(name, item.value())) {
        continue;
      }
      FSDP_RETURN_IF_ERROR(CheckParameter(name, item.value()));
      tree_.uses.push_back({index, name, ties_.Add(name, item.value())});
      numel += item.value().numel();
    }
    return numel;
  }

  const Options& options_;
  ModuleTree tree_;
  std::map<const Module*, int> identities_;
  std::map<const Module*, bool> wanted_;
  flat_param::TiedParameters ties_;
};

}  // namespace

bool CanBeUnit(const Module& module) {
  return module.as<torch::nn::ModuleListImpl>() == nullptr &&
         module.as<torch::nn::ModuleDictImpl>() == nullptr;
}

absl::StatusOr<ModuleTree> ReadModuleTree(const std::shared_ptr<Module>& root,
                                          const Options& options) {
  Reader reader(options);
  FSDP_RETURN_IF_ERROR(reader.Read(root, "", -1).status());
  return reader.Take();
}

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

namespace {

std::vector<at::Tensor> OwnTensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters(/*recurse=*/false);
  for (at::Tensor& buffer : module.buffers(/*recurse=*/false)) {
    tensors.push_back(std::move(buffer));
  }
  return tensors;
}

// Returns a seed that is the same on every machine.
uint64_t SeedFor(absl::string_view path, uint64_t seed) {
  const uint64_t hash = Fnv1a(path, kFnv1a ^ seed);
  // Generators use the lower half of a seed.
  return hash ^ (hash >> 32);
}

}  // namespace

ModuleInitializer::ModuleInitializer(const ModuleTree& tree, InitModule init,
                                     uint64_t seed)
    : tree_(tree), init_(std::move(init)), seed_(seed) {
  waits_.resize(tree.nodes.size());
  users_.resize(tree.parameters.size());
  if (!init_) return;
  for (const ParameterUse& use : tree.uses) {
    users_[use.parameter].push_back(use.module);
  }
  for (size_t node = 0; node < tree.nodes.size(); ++node) {
    for (const at::Tensor& tensor : OwnTensors(*tree.modules[node])) {
      if (IsDeferred(tensor)) waits_[node] = true;
    }
  }
}

absl::Status ModuleInitializer::InitUsersOf(const Unit& unit) {
  for (const OwnedParameter& owned : unit.parameters) {
    for (const int node : users_[owned.parameter]) {
      FSDP_RETURN_IF_ERROR(Init(node));
    }
  }
  return absl::OkStatus();
}

absl::Status ModuleInitializer::InitTheRest() {
  for (size_t node = 0; node < waits_.size(); ++node) {
    FSDP_RETURN_IF_ERROR(Init(static_cast<int>(node)));
  }
  return absl::OkStatus();
}

absl::Status ModuleInitializer::Init(int node) {
  if (!waits_[node]) return absl::OkStatus();
  waits_[node] = false;
  torch::nn::Module& module = *tree_.modules[node];
  const std::string& path = tree_.nodes[node].path;
  return TorchToStatus(absl::StrCat("initialising module ", path), [&] {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& tensor : OwnTensors(module)) Materialize(tensor);
    const SeedGuard seeded(SeedFor(path, seed_));
    return init_(path, module);
  });
}

}  // namespace fsdp
