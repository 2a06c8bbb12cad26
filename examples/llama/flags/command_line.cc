#include "examples/llama/flags/command_line.h"

#include <ATen/Version.h>

#include <filesystem>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/substitute.h"
#include "base/command_line.h"

namespace llama {

absl::Status ParseFlags(int argc, char** argv, absl::string_view usage,
                        absl::string_view file) {
  // A flag of more than two values needs a value, but --resume may stand alone.
  static char resume[] = "--resume=true";
  static char no_resume[] = "--resume=false";
  std::vector<char*> arguments(argv, argv + argc);
  for (char*& argument : arguments) {
    if (argument == absl::string_view("--resume")) argument = resume;
    if (argument == absl::string_view("--noresume")) argument = no_resume;
  }
  const std::vector<char*> rest = fsdp::ParseCommandLine(
      argc, arguments.data(),
      absl::Substitute(usage,
                       std::filesystem::path(argv[0]).filename().string()),
      file);
  if (rest.size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("what is ", rest[1], "? Flags begin with --"));
}

bool AbslParseFlag(absl::string_view text, Base* base, std::string* error) {
  if (text != "precision" && text != "int8") {
    *error = "expected precision or int8";
    return false;
  }
  *base = text == "int8" ? Base::kInt8 : Base::kPrecision;
  return true;
}

std::string AbslUnparseFlag(Base base) {
  return base == Base::kInt8 ? "int8" : "precision";
}

namespace {

// oneDNN multiplies bfloat16 by instructions of AVX-512; without them LibTorch
// takes up to hundreds of times longer than for float32.
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
