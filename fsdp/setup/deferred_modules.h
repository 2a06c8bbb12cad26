// When a model that was constructed without memory gets it: unit by unit.
#ifndef FSDP_SETUP_DEFERRED_MODULES_H_
#define FSDP_SETUP_DEFERRED_MODULES_H_

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "fsdp/setup/module_tree.h"
#include "fsdp/setup/unit_plan.h"

namespace fsdp {

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

#endif  // FSDP_SETUP_DEFERRED_MODULES_H_
