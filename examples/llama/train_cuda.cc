// The program of train.cc with CUDA and NCCL.
//   bazel run --config=cuda //examples/llama:train_cuda -- --device=cuda
#include <c10/core/Device.h>

#include "base/device_graph.h"
#include "comm/nccl/nccl_communicator.h"
#include "examples/llama/train_run.h"

int main(int argc, char** argv) {
  return llama::TrainProgram(
      argc, argv,
      [](c10::Device gpu) {
        fsdp::comm::NcclOptions options;
        options.device = gpu.index();
        return fsdp::comm::NcclBackend(options);
      },
      fsdp::MakeCudaGraph);
}
