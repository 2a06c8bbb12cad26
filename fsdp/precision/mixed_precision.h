// The dtypes in which a unit computes, reduces and stores.
#ifndef FSDP_PRECISION_MIXED_PRECISION_H_
#define FSDP_PRECISION_MIXED_PRECISION_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace fsdp {

// Selects which inputs are cast.
enum class CastInputs {
  kNever,      // none
  kRoot,       // what the user passes to the model
  kEveryUnit,  // what each unit is called with
};

// The dtypes of one unit. Shards, and so optimizer states, keep the dtype that
// the parameters had. The default changes nothing.
struct MixedPrecision {
  // Full parameters, and so the unit's computing. If unset, as stored.
  std::optional<c10::ScalarType> param_dtype;
  // Reductions, and gradients kept whole under NoSync. If unset, param_dtype.
  std::optional<c10::ScalarType> reduce_dtype;
  // Floating-point buffers of the unit's modules. If unset, as they are.
  std::optional<c10::ScalarType> buffer_dtype;
  // Floating-point outputs of the root's forward. If unset, as computed.
  std::optional<c10::ScalarType> output_dtype;

  // Selects where floating-point inputs are cast to param_dtype. Autograd sees
  // the cast: an input that requires grad gets its gradient in its own dtype.
  CastInputs cast_inputs = CastInputs::kRoot;
  // Casts inputs in fp16 and bf16 to fp32 instead, for a unit in full precision
  // that follows one in low precision. Not with a param_dtype other than fp32.
  bool force_input_to_fp32 = false;
  // Leaves shards' gradients in the reduce dtype.
  bool keep_low_precision_grads = false;
  // Casts nothing while the model is in eval mode.
  bool full_precision_in_eval = false;
  // Chooses modules whose own parameters and buffers keep their dtype inside a
  // unit that computes in another; LibTorch's normalisation layers take inputs
  // in a lower one. If unset, batch normalisation.
  std::function<bool(const torch::nn::Module&)> keep_full_precision;

  // InvalidArgument: a dtype is not float, double, half or bfloat16, or options
  // contradict each other.
  absl::Status Validate() const;

  // These return the dtypes for parameters stored in `stored`. Bytes stay
  // bytes.
  c10::ScalarType ParamDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored) ? param_dtype.value_or(stored) : stored;
  }
  c10::ScalarType ReduceDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored)
               ? reduce_dtype.value_or(ParamDtype(stored))
               : stored;
  }
  // Returns whether `keep_full_precision`, or its default, chooses the module.
  bool Keeps(const torch::nn::Module& module) const;

  // Returns "param BFloat16, reduce Float, inputs cast at the root".
  std::string ToString() const;
};

// Returns the options to compute in `dtype` and reduce in fp32.
MixedPrecision ComputeIn(c10::ScalarType dtype);

// These are for MixedPrecision::keep_full_precision. The first chooses batch
// normalisation of any dimension, the second also layer, group and instance
// normalisation.
bool IsBatchNorm(const torch::nn::Module& module);
bool IsNormalization(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_PRECISION_MIXED_PRECISION_H_
