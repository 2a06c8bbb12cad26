// A module's parameters and buffers as a map by name, without wrappers in the
// names: the state dict of Python's modules, which LibTorch lacks.
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

// The form in which parameters of a FlattenParamsWrapper appear.
enum class StateForm {
  kOriginal,  // under their own names and shapes, as without wrappers
  kFlat,      // as the wrapper's "flat_param", "blocks.0.flat_param" if nested,
              // "flat_param_1" of the inner of two around one module
};

// Returns each module's parameters, then its buffers, then its children's. Tied
// parameters appear under each of their names. Children that are not
// serializable are left out. The tensors require no grad and share memory with
// the module; clone them to keep values.
NamedTensors StateDict(const std::shared_ptr<torch::nn::Module>& module,
                       StateForm form = StateForm::kOriginal);

// Copies `tensors`, of any dtype and device, into the parameters and buffers of
// their names. InvalidArgument lists every difference, and nothing is copied: a
// size differs, or a name is missing in `tensors` or in the module. Without
// `strict`, names that are missing on one side are skipped.
absl::Status LoadStateDict(const std::shared_ptr<torch::nn::Module>& module,
                           const NamedTensors& tensors, bool strict = true,
                           StateForm form = StateForm::kOriginal);

}  // namespace fsdp::flat_param

#endif  // FLAT_PARAM_MODULE_STATE_H_
