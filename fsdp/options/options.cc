#include "fsdp/options/options.h"

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/normalization.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "comm/quantized/quantization_log.h"
#include "comm/quantized/quantized_communicator.h"
#include "device_ops/block_quantization.h"

namespace fsdp {
namespace {

absl::Status CheckDtype(absl::string_view name,
                        std::optional<c10::ScalarType> dtype) {
  const bool is_computable = dtype == c10::kFloat || dtype == c10::kDouble ||
                             dtype == c10::kHalf || dtype == c10::kBFloat16;
  if (!dtype.has_value() || is_computable) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mixed precision: ", name, " is ", c10::toString(*dtype),
                   ", but has to be Float, Double, Half or BFloat16"));
}

template <typename... Modules>
bool IsOneOf(const torch::nn::Module& module) {
  return (... || (module.as<Modules>() != nullptr));
}

}  // namespace

absl::Status MixedPrecision::Validate() const {
  FSDP_RETURN_IF_ERROR(CheckDtype("param_dtype", param_dtype));
  FSDP_RETURN_IF_ERROR(CheckDtype("reduce_dtype", reduce_dtype));
  FSDP_RETURN_IF_ERROR(CheckDtype("buffer_dtype", buffer_dtype));
  FSDP_RETURN_IF_ERROR(CheckDtype("output_dtype", output_dtype));
  if (force_input_to_fp32 && param_dtype.value_or(c10::kFloat) != c10::kFloat) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mixed precision: force_input_to_fp32 is for units that compute in "
        "fp32, but param_dtype is ",
        c10::toString(*param_dtype)));
  }
  if (cast_inputs == CastInputs::kEveryUnit && !param_dtype.has_value()) {
    return absl::InvalidArgumentError(
        "mixed precision: cast_inputs is kEveryUnit, but there is no "
        "param_dtype to cast to");
  }
  return absl::OkStatus();
}

bool MixedPrecision::Keeps(const torch::nn::Module& module) const {
  return keep_full_precision ? keep_full_precision(module)
                             : IsBatchNorm(module);
}

std::string MixedPrecision::ToString() const {
  std::vector<std::string> parts;
  const auto add = [&](absl::string_view name,
                       std::optional<c10::ScalarType> dtype) {
    if (!dtype.has_value()) return;
    parts.push_back(absl::StrCat(name, " ", c10::toString(*dtype)));
  };
  add("param", param_dtype);
  add("reduce", reduce_dtype);
  add("buffer", buffer_dtype);
  add("output", output_dtype);
  if (param_dtype.has_value() && cast_inputs == CastInputs::kRoot) {
    parts.push_back("inputs cast at the root");
  }
  if (cast_inputs == CastInputs::kEveryUnit) {
    parts.push_back("inputs cast at every unit");
  }
  if (force_input_to_fp32) parts.push_back("inputs forced to fp32");
  if (keep_low_precision_grads) parts.push_back("low-precision gradients");
  if (full_precision_in_eval) parts.push_back("full precision in eval");
  return parts.empty() ? "as stored" : absl::StrJoin(parts, ", ");
}

MixedPrecision ComputeIn(c10::ScalarType dtype) {
  MixedPrecision precision;
  precision.param_dtype = dtype;
  precision.reduce_dtype = c10::kFloat;
  return precision;
}

bool IsBatchNorm(const torch::nn::Module& module) {
  return IsOneOf<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl,
                 torch::nn::BatchNorm3dImpl>(module);
}

bool IsNormalization(const torch::nn::Module& module) {
  return IsBatchNorm(module) ||
         IsOneOf<torch::nn::LayerNormImpl, torch::nn::GroupNormImpl,
                 torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl,
                 torch::nn::InstanceNorm3dImpl>(module);
}

absl::Status Quantization::Validate() const {
  if (block < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "quantize: a block of ", block,
        " numbers cannot share a scale: it takes at least 1; 256 is usual"));
  }
  if (block > device_ops::kMaxBlock) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantize: a block of ", block,
                     " numbers is too long to share a scale: it takes at most ",
                     device_ops::kMaxBlock, "; 256 is usual"));
  }
  if (gather_extension != nullptr && !gather) {
    return absl::InvalidArgumentError(
        "quantize: there is a gather_extension, and `gather` is false: set it "
        "to have parameters gathered by the extension");
  }
  if (min_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("quantize: min_bytes is ", min_bytes,
                     "; no size is below 0, with which everything is "
                     "quantised"));
  }
  return absl::OkStatus();
}

comm::QuantizationOptions Quantization::ForGroup(int64_t exact_tail) const {
  comm::QuantizationOptions options;
  options.gather = gather;
  options.reduce = reduce;
  options.block = block;
  options.min_bytes = min_bytes;
  options.exact_tail = exact_tail;
  options.log = log;
  options.gather_extension = gather_extension;
  return options;
}

std::string Quantization::ToString() const {
  if (!any()) return "";
  return absl::StrCat(gather ? "gathers" : "",
                      gather_extension == nullptr
                          ? ""
                          : absl::StrCat(" by ", gather_extension->ToString()),
                      gather && reduce ? ", " : "", reduce ? "sums" : "",
                      " in blocks of ", block, " from ", min_bytes,
                      " bytes on");
}

WrapPolicy WrapLargerThan(int64_t min_numel) {
  return [min_numel](const WrapCandidate& candidate) {
    return candidate.unowned_numel >= min_numel;
  };
}

WrapPolicy EveryUnit() {
  return [](const WrapCandidate& candidate) { return candidate.is_unit; };
}

WrapPolicy WrapAny(WrapPolicy first, WrapPolicy second) {
  return [first = std::move(first),
          second = std::move(second)](const WrapCandidate& candidate) {
    return first(candidate) || second(candidate);
  };
}

const char* ToString(ShardingStrategy strategy) {
  static constexpr const char* kNames[] = {
      "full shard",      "shard gradients and optimizer",
      "shard optimizer", "no shard",
      "hybrid shard",    "hybrid shard gradients and optimizer"};
  return kNames[static_cast<int>(strategy)];
}

}  // namespace fsdp
