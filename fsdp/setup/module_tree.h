// Reads a model's modules and parameters as plain data for PlanUnits().
#ifndef FSDP_SETUP_MODULE_TREE_H_
#define FSDP_SETUP_MODULE_TREE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "fsdp/options/wrap_policy.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

struct ModuleTree {
  std::vector<ModuleNode> nodes;  // pre-order, the root first
  std::vector<std::shared_ptr<torch::nn::Module>> modules;  // of the nodes
  // Of the nodes: elements of the parameters below that no unit inside owns.
  std::vector<int64_t> unowned_numel;
  std::vector<ParameterUse> uses;
  // By ParameterUse::parameter: every tensor object that is this parameter.
  // Tensors are tied when they are one object or the same view of one storage.
  std::vector<std::vector<at::Tensor>> parameters;
};

// Whether policies are asked about `module`: ModuleList and ModuleDict have no
// forward.
bool CanBeUnit(const torch::nn::Module& module);

// What the reader asks; each may be empty.
struct TreePolicies {
  WrapPolicy wrap;  // for every module but the root
  // What is left as it is: modules with everything below them, parameters.
  std::function<bool(const std::string& path, const torch::nn::Module&)>
      ignore_module;
  std::function<bool(const std::string& name, const at::Tensor&)>
      ignore_parameter;
};

// InvalidArgument, naming the parameter: neither a real floating-point dtype
// nor bytes, sparse or quantised, undefined, on a meta device, or overlapping
// another parameter in part. FailedPrecondition: it belongs to a unit already.
absl::StatusOr<ModuleTree> ReadModuleTree(
    const std::shared_ptr<torch::nn::Module>& root,
    const TreePolicies& policies);

// When a model that was constructed without memory gets it: unit by unit.

// Calls a user's function for modules with deferred tensors of their own.
class ModuleInitializer {
 public:
  using InitModule = std::function<absl::Status(const std::string& path,
                                                torch::nn::Module& module)>;

  // Notes which modules of `tree` are deferred. `tree` outlives this object.
  ModuleInitializer(const ModuleTree& tree, InitModule init, uint64_t seed);

  // Modules that use parameters of `unit`, before it is flattened.
  absl::Status InitUsersOf(const Unit& unit);
  // Modules that no unit's parameters are used by.
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

#endif  // FSDP_SETUP_MODULE_TREE_H_
