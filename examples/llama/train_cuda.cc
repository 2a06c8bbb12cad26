// The program of train.cc with CUDA and NCCL.
//   bazel run --config=cuda //examples/llama:train_cuda -- --device=cuda
#include <c10/core/Device.h>

#include "base/device_graph.h"
#include "comm/nccl/nccl_communicator.h"
#include "examples/llama/train_run.h"

int main(int argc, char** argv) {
  return llama::TrainProgram(
      argc, argv,
      [](c10::Device /*gpu*/) {
        return fsdp::comm::NcclBackend();  // which takes the same one
      },
      fsdp::MakeCudaGraph);
}
