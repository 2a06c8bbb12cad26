// Checks the arguments of C functions and makes C++ values of them.
#ifndef CAPI_ARGUMENTS_H_
#define CAPI_ARGUMENTS_H_

#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "capi/libtorch_fsdp.h"
#include "comm/startup/environment.h"
#include "fsdp/options/options.h"

namespace fsdp::capi {

// Errors are as capi/libtorch_fsdp.h has them, and name what is wrong.

absl::StatusOr<int32_t> DtypeOf(at::ScalarType type);

// `address` may be null.
absl::StatusOr<comm::Environment> EnvironmentOf(int rank, int world_size,
                                                const char* address);

// `given` may be null. InvalidArgument: `script` has no module of a type that
// it names.
absl::StatusOr<Options> OptionsOf(const fsdp_model_options* given,
                                  const torch::jit::Module& script);

absl::StatusOr<torch::jit::Module> LoadScript(const char* path);

// The copies have memory of their own.
absl::StatusOr<std::vector<c10::IValue>> CopiesOf(const fsdp_tensor* inputs,
                                                  int num_inputs);

}  // namespace fsdp::capi

#endif  // CAPI_ARGUMENTS_H_
