// The program of train.cc with CUDA and NCCL.
//   bazel run --config=cuda //examples/gpt:train_cuda -- --device=cuda
#include <c10/core/Device.h>

#include "comm/nccl/nccl_communicator.h"
#include "examples/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, [](c10::Device /*gpu*/) {
    return fsdp::comm::NcclBackend();  // which takes the same one
  });
}
