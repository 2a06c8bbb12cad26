// Which dtype each step of training works in.
#ifndef FSDP_PRECISION_MIXED_PRECISION_H_
#define FSDP_PRECISION_MIXED_PRECISION_H_

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace fsdp {

enum class CastInputs {
  kNever,
  kRoot,       // what the user passes to the model
  kEveryUnit,  // what each unit is called with
};

// The dtypes of one unit. Shards, and with them optimizer states, keep the
// dtype that the parameters had; the default changes nothing.
struct MixedPrecision {
  // Full parameters, and so what the unit computes in. Unset: as stored.
  std::optional<c10::ScalarType> param_dtype;
  // Reductions, and gradients kept whole under NoSync. Unset: param_dtype.
  std::optional<c10::ScalarType> reduce_dtype;
  // Floating-point buffers of the unit's modules. Unset: as they are.
  std::optional<c10::ScalarType> buffer_dtype;
  // Floating-point outputs of the root's forward. Unset: as computed.
  std::optional<c10::ScalarType> output_dtype;

  // Floating-point inputs are cast to param_dtype, visibly to autograd: an
  // input that requires grad gets its gradient in its own dtype.
  CastInputs cast_inputs = CastInputs::kRoot;
  // Inputs in fp16 and bf16 are cast to fp32 instead, for a unit in full
  // precision behind one in low precision. Not with a param_dtype.
  bool force_input_to_fp32 = false;
  // Leave shards' gradients in the reduce dtype.
  bool keep_low_precision_grads = false;
  // While the model is in eval mode nothing is cast.
  bool full_precision_in_eval = false;
  // Modules whose own parameters and buffers keep their dtype inside a unit
  // that computes in another. LibTorch's normalisation layers take inputs in a
  // lower one. Unset: batch normalisation.
  std::function<bool(const torch::nn::Module&)> keep_full_precision;

  // InvalidArgument: a dtype that is not a real floating-point one of at most
  // 64 bits, or options that contradict each other.
  absl::Status Validate() const;

  // Of what is stored in that dtype. Bytes stay bytes.
  c10::ScalarType ParamDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored) ? param_dtype.value_or(stored) : stored;
  }
  c10::ScalarType ReduceDtype(c10::ScalarType stored) const {
    return c10::isFloatingType(stored)
               ? reduce_dtype.value_or(ParamDtype(stored))
               : stored;
  }
  c10::ScalarType GradientDtype(c10::ScalarType stored) const {
    return keep_low_precision_grads ? ReduceDtype(stored) : stored;
  }
  bool Keeps(const torch::nn::Module& module) const;

  // "param bfloat16, reduce float32, inputs cast at the root".
  std::string ToString() const;
};

// Compute in `dtype` and reduce in fp32.
MixedPrecision ComputeIn(c10::ScalarType dtype);

// For MixedPrecision::keep_full_precision: batch normalisation of any
// dimension; that, layer, group and instance normalisation.
bool IsBatchNorm(const torch::nn::Module& module);
bool IsNormalization(const torch::nn::Module& module);

}  // namespace fsdp

#endif  // FSDP_PRECISION_MIXED_PRECISION_H_
