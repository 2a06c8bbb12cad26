#include "capi/arguments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/safe_numerics.h>
#include <torch/csrc/jit/serialization/import.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "base/torch_status.h"
#include "fsdp/precision/mixed_precision.h"
#include "fsdp/script_module.h"

namespace fsdp::capi {
namespace {

constexpr std::pair<int32_t, at::ScalarType> kDtypes[] = {
    {FSDP_FLOAT32, at::kFloat}, {FSDP_FLOAT64, at::kDouble},
    {FSDP_FLOAT16, at::kHalf},  {FSDP_BFLOAT16, at::kBFloat16},
    {FSDP_INT32, at::kInt},     {FSDP_INT64, at::kLong},
    {FSDP_UINT8, at::kByte},    {FSDP_BOOL, at::kBool},
};

absl::StatusOr<at::ScalarType> ScalarTypeOf(int32_t dtype) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (ours == dtype) return torchs;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype ", dtype, ": expected FSDP_FLOAT32 = ", FSDP_FLOAT32,
                   " to FSDP_BOOL = ", FSDP_BOOL));
}

std::string Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::StatusOr<at::Tensor> CopyOf(const fsdp_tensor& given) {
  FSDP_ASSIGN_OR_RETURN(const at::ScalarType dtype, ScalarTypeOf(given.dtype));
  if (given.ndim < 0 || given.ndim > FSDP_MAX_DIMS) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ndim is ", given.ndim, ": expected 0 to ", FSDP_MAX_DIMS));
  }
  if (given.sizes == nullptr && given.ndim > 0) {
    return absl::InvalidArgumentError("sizes is null");
  }
  const at::IntArrayRef sizes(given.sizes, given.ndim);
  auto bytes = static_cast<int64_t>(at::elementSize(dtype));
  for (int64_t size : sizes) {
    if (size < 0 || c10::mul_overflows(bytes, size, &bytes)) {
      return absl::InvalidArgumentError(
          "a size is negative, or their product too large");
    }
  }
  if (bytes == 0) return at::empty(sizes, dtype);
  if (given.data == nullptr) {
    return absl::InvalidArgumentError("data is null");
  }
  return at::from_blob(const_cast<void*>(given.data), sizes, dtype).clone();
}

}  // namespace

absl::StatusOr<int32_t> DtypeOf(at::ScalarType type) {
  for (const auto& [ours, torchs] : kDtypes) {
    if (torchs == type) return ours;
  }
  return absl::UnimplementedError(
      absl::StrCat("C has no number for the dtype ", c10::toString(type)));
}

absl::StatusOr<comm::Environment> EnvironmentOf(int rank, int world_size,
                                                const char* address) {
  comm::Environment environment;
  environment.rank = rank;
  environment.world_size = world_size;
  environment.secret = Variable("FSDP_JOB_SECRET");
  environment.interface = Variable("GLOO_SOCKET_IFNAME");
  environment.inspection_folder = Variable("FSDP_INSPECT_DIR");
  if (address == nullptr) return environment;
  const absl::string_view place = address;
  const size_t colon = std::min(place.rfind(':'), place.size());
  absl::string_view host = place.substr(0, colon);
  const bool is_bracketed =
      absl::ConsumePrefix(&host, "[") && absl::ConsumeSuffix(&host, "]");
  environment.master_addr = std::string(host);
  const bool is_host =
      !host.empty() && (is_bracketed || !absl::StrContains(host, ':'));
  const bool is_port =
      colon < place.size() &&
      absl::SimpleAtoi(place.substr(colon + 1), &environment.master_port) &&
      environment.master_port > 0 && environment.master_port <= 65535;
  if (is_port && is_host) return environment;
  return absl::InvalidArgumentError(
      absl::StrCat("address \"", place,
                   "\": expected host:port, as in node1:29500 or [::1]:29500"));
}

absl::StatusOr<Options> OptionsOf(const fsdp_model_options* given,
                                  const torch::jit::Module& script) {
  Options options;
  if (given == nullptr) return options;
  if (given->version != FSDP_MODEL_OPTIONS_VERSION) {
    return absl::InvalidArgumentError(
        absl::StrCat("fsdp_model_options::version is ", given->version,
                     ": this library knows ", FSDP_MODEL_OPTIONS_VERSION));
  }
  if (given->compute_dtype != FSDP_AS_STORED) {
    FSDP_ASSIGN_OR_RETURN(const at::ScalarType dtype,
                          ScalarTypeOf(given->compute_dtype));
    options.unit.precision = ComputeIn(dtype);
  }
  if (given->unit_types != nullptr && *given->unit_types != '\0') {
    std::set<std::string> known;
    for (const torch::jit::Module& module : script.modules()) {
      known.insert(module.type()->name()->name());
    }
    std::vector<std::string> types =
        absl::StrSplit(given->unit_types, ',', absl::SkipWhitespace());
    for (std::string& type : types) {
      absl::StripAsciiWhitespace(&type);
      if (known.count(type) == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("fsdp_model_options::unit_types names \"", type,
                         "\": the script has ", absl::StrJoin(known, ", ")));
      }
    }
    options.wrap_policy = WrapScriptModules(std::move(types));
  }
  return options;
}

absl::StatusOr<torch::jit::Module> LoadScript(const char* path) {
  if (access(path, R_OK) != 0) return absl::ErrnoToStatus(errno, path);
  std::optional<torch::jit::Module> script;
  const absl::Status loaded = TorchToStatus(
      absl::StrCat("loading ", path),
      [&] { script = torch::jit::load(std::string(path), at::kCPU); });
  // LibTorch does not tell a file that is not TorchScript from a bug.
  if (absl::IsInternal(loaded)) {
    return absl::InvalidArgumentError(loaded.message());
  }
  FSDP_RETURN_IF_ERROR(loaded);
  return *script;
}

absl::StatusOr<std::vector<c10::IValue>> CopiesOf(const fsdp_tensor* inputs,
                                                  int num_inputs) {
  if (num_inputs < 0) {
    return absl::InvalidArgumentError("num_inputs is negative");
  }
  std::vector<c10::IValue> copies;
  for (int i = 0; i < num_inputs; ++i) {
    const absl::StatusOr<at::Tensor> copy = CopyOf(inputs[i]);
    if (!copy.ok()) {
      return Annotate(copy.status(), absl::StrCat("input ", i));
    }
    copies.emplace_back(*copy);
  }
  return copies;
}

}  // namespace fsdp::capi
