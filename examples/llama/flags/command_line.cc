#include "examples/llama/flags/command_line.h"

#include <ATen/Version.h>

#include <filesystem>
#include <ostream>

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

c10::ScalarType DtypeOf(Precision precision, c10::DeviceType device,
                        std::ostream* log) {
  // oneDNN multiplies bfloat16 by instructions of AVX-512; without them
  // LibTorch takes up to hundreds of times longer than for float32.
  const bool is_fast =
      device != c10::DeviceType::CPU || at::get_cpu_capability() == "AVX512";
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

}  // namespace llama
