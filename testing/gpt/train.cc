// Trains a byte-level GPT with fsdp and shows what it has learnt.
//   bazel run //testing/gpt:train -- --help
#include "testing/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, /*nccl_on=*/nullptr);
}
