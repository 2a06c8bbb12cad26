// Trains a byte-level GPT with fsdp and shows what it has learnt.
//   bazel run //examples/gpt:train -- --help
#include "examples/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, /*nccl_on=*/nullptr);
}
