// Flattened nets, and what to compare them with.
#ifndef FLAT_PARAM_TESTING_FLAT_NET_H_
#define FLAT_PARAM_TESTING_FLAT_NET_H_

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/status_macros.h"
#include "flat_param/flatten_params_wrapper.h"
#include "flat_param/testing/tied_net.h"

namespace fsdp::flat_param::testing {

inline FlattenParamsWrapper<TiedNetImpl> FlatNet(int seed = 0) {
  return ValueOrThrow(FlattenParams(MakeTiedNet(seed)));
}

// Selects parameters by the beginning of their names.
inline FlattenOptions Only(const std::string& prefix) {
  FlattenOptions options;
  options.select = [prefix](const std::string& name, const at::Tensor&) {
    return name.rfind(prefix, 0) == 0;
  };
  return options;
}

inline std::vector<std::string> Names(const torch::nn::Module& module) {
  return module.named_parameters().keys();
}

// Returns the gradient that goes with FlatValues().
inline at::Tensor FlatGradient(const torch::nn::Module& plain) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : DistinctParameters(plain)) {
    parts.push_back(parameter.grad().reshape({-1}));
  }
  return at::cat(parts);
}

// Returns the flat parameter that the parameters of `plain` make.
inline at::Tensor FlatValues(const torch::nn::Module& plain) {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : DistinctParameters(plain)) {
    parts.push_back(parameter.detach().reshape({-1}));
  }
  return at::cat(parts);
}

// Returns the error that `call` throws.
inline absl::Status ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const StatusError& error) {
    return error.status();
  }
  return absl::OkStatus();
}

}  // namespace fsdp::flat_param::testing

#endif  // FLAT_PARAM_TESTING_FLAT_NET_H_
