#include "fsdp/unit_handle.h"

#include <memory>
#include <vector>

namespace fsdp {

// The handle is registered last: nobody adds children to a module that is
// sharded already.
std::shared_ptr<UnitHandle> FindUnit(const torch::nn::Module& module) {
  const std::vector<std::shared_ptr<torch::nn::Module>> children =
      module.children();
  for (auto it = children.rbegin(); it != children.rend(); ++it) {
    if (auto handle = std::dynamic_pointer_cast<UnitHandle>(*it)) return handle;
  }
  return nullptr;
}

}  // namespace fsdp
