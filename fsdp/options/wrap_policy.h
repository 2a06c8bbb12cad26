// Policies that choose the modules of a model that become units.
#ifndef FSDP_OPTIONS_WRAP_POLICY_H_
#define FSDP_OPTIONS_WRAP_POLICY_H_

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

namespace fsdp {

struct WrapCandidate {
  const std::string& path;  // "blocks.0"
  const torch::nn::Module& module;
  // Elements of the parameters below the module that no unit inside it owns.
  int64_t unowned_numel;
  // The module is a unit. It is false for Options::wrap_policy, which decides
  // that.
  bool is_unit = false;
};

// Returns whether the module is chosen, with the same answer on all ranks. It
// is called for every module but the root, children before their parents, and
// never for ModuleList and ModuleDict, which have no forward.
using WrapPolicy = std::function<bool(const WrapCandidate&)>;

// Chooses modules of these types, for example WrapModules<BlockImpl>().
template <typename... Modules>
WrapPolicy WrapModules() {
  static_assert(
      (!std::is_base_of_v<torch::detail::ModuleHolderIndicator, Modules> &&
       ...),
      "WrapModules<Block>(), where Block is what TORCH_MODULE(Block) declares, "
      "a holder, would find no module: write WrapModules<BlockImpl>()");
  return [](const WrapCandidate& candidate) {
    return ((dynamic_cast<const Modules*>(&candidate.module) != nullptr) ||
            ...);
  };
}

// Chooses modules with at least `min_numel` elements that no unit inside them
// owns, as fairscale's default_auto_wrap_policy does.
WrapPolicy WrapLargerThan(int64_t min_numel);

// Chooses every unit but the root, for Options::recompute.units.
WrapPolicy EveryUnit();

// Chooses modules that either of the two chooses.
WrapPolicy WrapAny(WrapPolicy first, WrapPolicy second);

}  // namespace fsdp

#endif  // FSDP_OPTIONS_WRAP_POLICY_H_
