// The layers of a model that can have adapters, by name.
#ifndef ADAPTERS_LAYERS_H_
#define ADAPTERS_LAYERS_H_

#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "adapters/linear.h"

namespace fsdp::adapters {

// A layer with several names has an entry for each.
using Layers = std::map<std::string, LinearImpl*>;

Layers LayersOf(const torch::nn::Module& module);

// Returns the model that FullyShard() was given, if `module` is its result.
const torch::nn::Module& Unwrapped(const torch::nn::Module& module);

// Returns whether one of `names` is the module's name or the end of it.
bool IsNamedBy(absl::string_view name, const std::vector<std::string>& names);

}  // namespace fsdp::adapters

#endif  // ADAPTERS_LAYERS_H_
