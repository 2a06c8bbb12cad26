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

}  // namespace fsdp

#endif  // FSDP_SETUP_MODULE_TREE_H_
