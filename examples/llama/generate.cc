// Continues a text or tokens with a Llama, Qwen2 or Qwen3.
//   bazel run //examples/llama:generate -- --help
#include "examples/llama/generate_run.h"

int main(int argc, char** argv) { return llama::GenerateProgram(argc, argv); }
