// Measures steps of training, offload, the optimizer and collectives on one
// GPU, each beside its yardstick (docs/performance.md, "On a GPU").
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_benchmarks --
//       --benchmark_filter=train_step/bf16
#include "benchmarks/gpu_benchmarks.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/status_macros.h"
#include "comm/nccl/nccl_communicator.h"

namespace fsdp::benchmarks {
namespace {

std::shared_ptr<comm::Communicator> NcclGroup(const Place& place) {
  comm::NcclOptions options;
  options.device = place.device.index();
  return ValueOrThrow(
      comm::CreateNcclCommunicator(c10::make_intrusive<c10d::HashStore>(),
                                   /*rank=*/0, /*world_size=*/1, options));
}

}  // namespace
}  // namespace fsdp::benchmarks

int main(int argc, char** argv) {
  using fsdp::benchmarks::Place;
  return fsdp::benchmarks::RunBenchmarks(
      argc, argv, [](const Place& place, int turns) {
        fsdp::benchmarks::AddGpuBenchmarks(
            place, turns,
            place.device.is_cuda() ? fsdp::benchmarks::NcclGroup : nullptr,
            place.device.is_cuda() ? fsdp::MakeCudaGraph : nullptr);
      });
}
