// Measures steps of training, offload, the optimizer and collectives on one
// GPU, each beside its yardstick (docs/performance.md, "On a GPU").
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_benchmarks --
//       --benchmark_filter=train_step/bf16
#include "benchmarks/gpu_benchmarks.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/status_macros.h"
#include "comm/nccl/nccl_communicator.h"

int main(int argc, char** argv) {
  const auto nccl = [](const fsdp::benchmarks::Place& place) {
    fsdp::comm::NcclOptions options;
    options.device = place.device.index();
    return fsdp::ValueOrThrow(fsdp::comm::CreateNcclCommunicator(
        c10::make_intrusive<c10d::HashStore>(), /*rank=*/0, /*world_size=*/1,
        options));
  };
  return fsdp::benchmarks::RunGpuBenchmarks(argc, argv, nccl,
                                            fsdp::MakeCudaGraph);
}
