// Fine-tunes a Llama, Qwen2 or Qwen3, sharded over ranks.
//   bazel run //examples/llama:train -- --help
#include "examples/llama/train_run.h"

int main(int argc, char** argv) { return llama::TrainProgram(argc, argv); }
