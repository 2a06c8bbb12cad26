// A module's parameters and buffers as a map by name, with wrappers left out of
// the names: the state dict of Python's modules, which LibTorch has not.
#ifndef FLAT_PARAM_MODULE_STATE_H_
#define FLAT_PARAM_MODULE_STATE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <memory>
#include <string>

#include "absl/status/status.h"

namespace fsdp::flat_param {

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

// How parameters that a FlattenParamsWrapper owns appear.
enum class StateForm {
  kOriginal,  // under their own names and shapes, as without wrappers
  kFlat,      // as the wrapper's "flat_param", "blocks.0.flat_param" if nested,
              // "flat_param_1" of the inner of two around one module
};

// Each module's parameters, then its buffers, then its children's. Tied
// parameters come under each of their names. Children that are not serializable
// are left out. The tensors require no grad and share memory with the module:
// clone them to keep values.
NamedTensors StateDict(const std::shared_ptr<torch::nn::Module>& module,
                       StateForm form = StateForm::kOriginal);

// Copies `tensors`, of any dtype and device, into the parameters and buffers of
// their names. InvalidArgument, listing every difference, with nothing copied:
// other sizes; a name that is missing in `tensors` or that the module lacks,
// which without `strict` is left out instead.
absl::Status LoadStateDict(const std::shared_ptr<torch::nn::Module>& module,
                           const NamedTensors& tensors, bool strict = true,
                           StateForm form = StateForm::kOriginal);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_MODULE_STATE_H_
