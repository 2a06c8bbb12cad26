// Visits a tree of modules by names without wrappers, gives access to what each
// module has registered, and finds registered tensors that are the same
// parameter, or share memory.
#ifndef FLAT_PARAM_MODULE_WALK_H_
#define FLAT_PARAM_MODULE_WALK_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "flat_param/flat_parameter.h"

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

// Tensors are tied when they are one object, or the same view of one storage.
// Empty tensors share nothing, whatever their storage.
class TiedParameters {
 public:
  // Returns the number of the parameter that `tensor` is: that of an earlier
  // tensor, or the next one. `name` is used if it is the first.
  int Add(const std::string& name, const at::Tensor& tensor);

  // The parameters in the order of their numbers.
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  std::vector<NamedParameter> Take() { return std::move(parameters_); }

  // InvalidArgument names two parameters that share elements, or lie between
  // each other's, but are not the same view; `what`, such as "flattening",
  // would separate them.
  absl::Status CheckOverlaps(absl::string_view what) const;

 private:
  using View = std::tuple<const void*, int64_t, std::vector<int64_t>,
                          std::vector<int64_t>>;

  std::vector<NamedParameter> parameters_;
  std::map<const void*, int> objects_;
  std::map<View, int> views_;
};

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_MODULE_WALK_H_
