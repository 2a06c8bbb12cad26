// Reads a model's modules and parameters as plain data for PlanUnits(), and
// gives modules that were constructed without memory their values.
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
#include "fsdp/options/options.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

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

#endif  // FSDP_SETUP_MODULE_TREE_H_
