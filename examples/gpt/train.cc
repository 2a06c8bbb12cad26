// Trains a byte-level GPT, sharded over the processes of this host or of many.
//   bazel run //examples/gpt:train -- --help
#include "examples/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, /*nccl_on=*/nullptr);
}
