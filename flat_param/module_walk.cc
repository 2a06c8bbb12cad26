#include "flat_param/module_walk.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace fsdp::flat_param {
namespace {

using ::torch::nn::Module;

// A derived class may name the protected member; the pointer to it is one to a
// member of Module and fits every module.
struct DictionaryAccess : Module {
  template <typename M>
  static auto& Of(M& module) {
    return module.*(&DictionaryAccess::parameters_);
  }
};

void Visit(const std::string& path, const std::shared_ptr<Module>& module,
           std::vector<ModulePlace>& places) {
  places.push_back({path, module});
  if (const auto* wrapper = dynamic_cast<const WrapperModule*>(module.get())) {
    Visit(path, wrapper->wrapped_module(), places);
    return;
  }
  for (const auto& child : module->named_children()) {
    Visit(JoinName(path, child.key()), child.value(), places);
  }
}

}  // namespace

std::vector<ModulePlace> PlacesOf(const std::shared_ptr<Module>& root) {
  std::vector<ModulePlace> places;
  Visit("", root, places);
  return places;
}

std::string JoinName(absl::string_view path, absl::string_view key) {
  return path.empty() ? std::string(key) : absl::StrCat(path, ".", key);
}

torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    Module& module) {
  return DictionaryAccess::Of(module);
}

const torch::OrderedDict<std::string, at::Tensor>& RegisteredParameters(
    const Module& module) {
  return DictionaryAccess::Of(module);
}

}  // namespace fsdp::flat_param
