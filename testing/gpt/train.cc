// Trains a GPT on rows that count, and shows its losses.
//   bazel run //testing/gpt:train -- --help
#include "testing/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, /*nccl_on=*/nullptr);
}
