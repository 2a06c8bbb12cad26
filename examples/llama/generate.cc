// Continues a text or tokens with a Llama, Qwen2 or Qwen3.
//   bazel run //examples/llama:generate -- --help
#include <iostream>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "examples/llama/flags/generate_flags.h"
#include "examples/llama/generate_run.h"

int main(int argc, char** argv) {
  const absl::StatusOr<llama::GenerateFlags> flags =
      llama::ReadGenerateFlags(argc, argv);
  if (!flags.ok()) {
    std::cerr << flags.status().message() << std::endl;
    return 2;
  }
  const absl::Status status =
      llama::RunGenerate(*flags, std::cin, std::cout, std::cerr);
  if (status.ok()) return 0;
  std::cerr << "generate: " << status.message() << std::endl;
  return 1;
}
