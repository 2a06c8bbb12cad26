// Reads a model's modules and parameters as plain data, decides which unit owns
// which parameter, and gives modules that were constructed without memory their
// values. A unit is a module whose parameters are gathered, freed and reduced
// together.
#ifndef FSDP_SETUP_UNIT_PLAN_H_
#define FSDP_SETUP_UNIT_PLAN_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "fsdp/options/options.h"

namespace fsdp {

// One place of the module tree. A module that is registered under several
// parents has a place for each, all with the same identity.
struct ModuleNode {
  std::string path;  // "blocks.0", "" for the root
  int parent;        // index of a node, -1 for the root
  bool is_unit;
  int identity;  // of the module object
};

// A parameter registered in a module. Uses with the same `parameter` are tied.
struct ParameterUse {
  int module;        // index of a node
  std::string name;  // full, without wrappers: "blocks.0.qkv.weight"
  int parameter;     // identity of the tensor
};

struct ModuleTree {
  std::vector<ModuleNode> nodes;  // pre-order, the root first
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // of the nodes
  // By node: elements of the parameters below that no unit inside owns.
  std::vector<int64_t> unowned_numel;
  std::vector<ParameterUse> uses;
  // By ParameterUse::parameter: every tensor object that is this parameter.
  // Tensors are tied if they are one object or the same view of one storage.
  std::vector<std::vector<at::Tensor>> parameters;
};

// Returns whether policies are asked about `module`; ModuleList and ModuleDict
// have no forward.
bool CanBeUnit(const torch::nn::Module& module);

// Reads all but what `options` ignore, and asks their wrap policy.
// InvalidArgument names a parameter that is neither of a real floating-point
// dtype nor bytes, that is sparse, quantised, undefined or on a meta device, or
// that overlaps another in part. FailedPrecondition: it belongs to a unit
// already.
absl::StatusOr<ModuleTree> ReadModuleTree(
    const std::shared_ptr<torch::nn::Module>& root, const Options& options);

struct OwnedParameter {
  int parameter;
  std::vector<std::string> names;  // in order of use; the first is canonical
};

struct Unit {
  std::string name;  // path of its module where that first appears
  int module;        // index of that node
  // Index of the innermost unit that surrounds every place of this one, which
  // is smaller than the unit's own; -1 for the root.
  int parent;
  std::vector<OwnedParameter> parameters;  // in order of first use; may be none
};

// Returns the name of a unit in messages: its path, or "root".
std::string DisplayName(const Unit& unit);

// Gives each parameter to the innermost unit that surrounds all its uses, at
// every place of the modules that use it, so that it is gathered whenever one
// of them runs. Returns the units in pre-order, the root first, also those
// that own nothing.
//
// `modules` are in pre-order, and the first is the root and a unit. Nodes of
// one module agree on being a unit, and none is inside itself. `uses` are in
// the order in which parameters will lie in their unit. A shared module's uses
// may be listed for one or for all of its places. InvalidArgument: there are
// none.
absl::StatusOr<std::vector<Unit>> PlanUnits(
    absl::Span<const ModuleNode> modules, absl::Span<const ParameterUse> uses);

// Calls a user's function for modules with deferred tensors of their own, unit
// by unit.
class ModuleInitializer {
 public:
  using InitModule = std::function<absl::Status(const std::string& path,
                                                torch::nn::Module& module)>;

  // Notes which modules of `tree` are deferred. `tree` must outlive this
  // object.
  ModuleInitializer(const ModuleTree& tree, InitModule init, uint64_t seed);

  // Initialises modules that use parameters of `unit`, before it is flattened.
  absl::Status InitUsersOf(const Unit& unit);
  // Initialises modules that use no unit's parameters.
  absl::Status InitTheRest();

 private:
  absl::Status Init(int node);

  const ModuleTree& tree_;
  const InitModule init_;
  const uint64_t seed_;
  std::vector<std::vector<int>> users_;  // nodes, by parameter
  std::vector<bool> waits_;              // by node
};

}  // namespace fsdp

#endif  // FSDP_SETUP_UNIT_PLAN_H_
