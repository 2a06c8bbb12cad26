// The program //examples/gpt:train.
#ifndef EXAMPLES_GPT_TRAIN_PROGRAM_H_
#define EXAMPLES_GPT_TRAIN_PROGRAM_H_

#include "examples/gpt/device_choice.h"

namespace gpt {

// What main() does, with NCCL where `nccl_on` is not empty. The exit code.
int TrainProgram(int argc, char** argv, const NcclOn& nccl_on);

}  // namespace gpt

#endif  // EXAMPLES_GPT_TRAIN_PROGRAM_H_
