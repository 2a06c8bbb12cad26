// The training program's main().
#ifndef EXAMPLES_GPT_TRAIN_PROGRAM_H_
#define EXAMPLES_GPT_TRAIN_PROGRAM_H_

#include "comm/run_ranks/run_ranks.h"

namespace gpt {

// Returns the program's exit code. `nccl_on` serves --device=cuda, with a GPU
// for each rank of a host; null in a program without NCCL.
int TrainProgram(int argc, char** argv, const fsdp::comm::NcclOn& nccl_on);

}  // namespace gpt

#endif  // EXAMPLES_GPT_TRAIN_PROGRAM_H_
