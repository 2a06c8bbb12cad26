// The command line of //examples/llama:generate.
#ifndef EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_
#define EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/flags/command_line.h"
#include "examples/llama/generation/generator.h"

namespace llama {

struct GenerateFlags {
  std::string model;
  std::string adapter;  // empty: none
  // One of the two.
  std::string prompt;
  std::string tokens;  // "-": of standard input

  int64_t max_tokens = 256;
  SamplingOptions sampling;
  Precision precision = Precision::kFloat;
  c10::DeviceType device = c10::DeviceType::CPU;
  Base base = Base::kPrecision;
  int threads = 0;  // 0: as many as LibTorch takes
};

// Reads the flags and exits for --help and what cannot be parsed. Relative
// paths become those the user meant, also under `bazel run`. InvalidArgument
// for what Check() refuses.
absl::StatusOr<GenerateFlags> ReadGenerateFlags(int argc, char** argv);

// InvalidArgument: numbers that cannot be, flags that need or exclude others.
absl::Status Check(const GenerateFlags& flags);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_
