// The program of train.cc with CUDA and NCCL.
//   bazel run --config=cuda //testing/gpt:train_cuda -- --device=cuda
#include <c10/core/Device.h>

#include "comm/nccl/nccl_communicator.h"
#include "testing/gpt/train_program.h"

int main(int argc, char** argv) {
  return gpt::TrainProgram(argc, argv, [](c10::Device gpu) {
    fsdp::comm::NcclOptions options;
    options.device = gpu.index();
    return fsdp::comm::NcclBackend(options);
  });
}
