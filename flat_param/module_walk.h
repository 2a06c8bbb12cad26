// Visits a tree of modules by names without wrappers, and gives access to what
// each module has registered.
#ifndef FLAT_PARAM_MODULE_WALK_H_
#define FLAT_PARAM_MODULE_WALK_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace fsdp::flat_param {

// A module around another that leaves no trace in names: LibTorch's
// "module.fc.weight" is "fc.weight" here.
class WrapperModule : public torch::nn::Module {
 public:
  virtual std::shared_ptr<torch::nn::Module> wrapped_module() const = 0;

 protected:
  using torch::nn::Module::Module;
};

struct ModulePlace {
  std::string path;  // "blocks.0", "" for the root
  std::shared_ptr<torch::nn::Module> module;
};

// Returns `root` and all modules below it in pre-order. A module that is
// registered in several places comes once per place. A wrapper has the path of
// the module that it wraps, which follows.
std::vector<ModulePlace> PlacesOf(
    const std::shared_ptr<torch::nn::Module>& root);

// Returns "blocks.0.weight", or `key` alone for an empty path.
std::string JoinName(absl::string_view path, absl::string_view key);

// Returns the parameters that `module` itself has registered, also undefined
// ones. LibTorch has no public way to unregister a parameter.
torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    torch::nn::Module& module);
const torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    const torch::nn::Module& module);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_MODULE_WALK_H_
