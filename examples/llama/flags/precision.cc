#include "examples/llama/flags/precision.h"

#include <ATen/Version.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace llama {
namespace {

// oneDNN multiplies bfloat16 by instructions that AVX-512 has; without them
// LibTorch takes up to hundreds of times longer than for float32.
bool MultipliesBFloat16Fast(c10::DeviceType device) {
  return device != c10::DeviceType::CPU || at::get_cpu_capability() == "AVX512";
}

}  // namespace

c10::ScalarType DtypeOf(Precision precision, c10::DeviceType device,
                        std::ostream* log) {
  const bool is_fast = MultipliesBFloat16Fast(device);
  if (precision == Precision::kFloat ||
      (precision == Precision::kOfDevice && !is_fast)) {
    return c10::kFloat;
  }
  if (!is_fast && log != nullptr) {
    *log << "--precision=bf16: this CPU has no AVX-512, and multiplies "
            "bfloat16 many times slower than float32: leave the flag away for "
            "fp32"
         << std::endl;
  }
  return c10::kBFloat16;
}

absl::StatusOr<c10::DeviceType> ParseDevice(absl::string_view name) {
  if (name == "cpu") return c10::DeviceType::CPU;
  if (name == "cuda") return c10::DeviceType::CUDA;
  return absl::InvalidArgumentError(
      absl::StrCat("--device=", name, ": expected cpu or cuda"));
}

bool AbslParseFlag(absl::string_view text, Precision* precision,
                   std::string* error) {
  for (const Precision each :
       {Precision::kOfDevice, Precision::kFloat, Precision::kBFloat16}) {
    if (text != AbslUnparseFlag(each)) continue;
    *precision = each;
    return true;
  }
  *error = "expected auto, fp32 or bf16";
  return false;
}

std::string AbslUnparseFlag(Precision precision) {
  return precision == Precision::kOfDevice ? "auto"
         : precision == Precision::kFloat  ? "fp32"
                                           : "bf16";
}

}  // namespace llama
