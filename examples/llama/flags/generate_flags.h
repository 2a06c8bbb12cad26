// The command line of //examples/llama:generate.
#ifndef EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_
#define EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "examples/llama/flags/command_line.h"
#include "examples/llama/generation/generator.h"

namespace llama {

struct GenerateFlags {
  std::string model;
  std::string adapter;  // empty: none
  // One of these two is set.
  std::string prompt;
  std::string tokens;  // "-": from standard input
  bool batch = false;  // each line of it is a prompt

  int64_t max_tokens = 256;
  SamplingOptions sampling;
  Precision precision = Precision::kFloat;
  c10::DeviceType device = c10::DeviceType::CPU;
  Base base = Base::kPrecision;
  int threads = 0;  // 0: as many as LibTorch chooses
};

// Reads the flags; exits for --help and flags that cannot be parsed. Resolves
// relative paths as the user meant them, also under `bazel run`.
// InvalidArgument: a number is impossible, or flags need or exclude others.
absl::StatusOr<GenerateFlags> ReadGenerateFlags(int argc, char** argv);

}  // namespace llama

#endif  // EXAMPLES_LLAMA_FLAGS_GENERATE_FLAGS_H_
