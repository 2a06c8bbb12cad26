// Measures steps of training, offload and the optimizer on one GPU, each beside
// its yardstick (docs/performance.md, "On a GPU").
//   ./bazelw run --config=opt --config=cuda //benchmarks:gpu_benchmarks --
//       --benchmark_filter=train_step/bf16
#include "benchmarks/gpu_benchmarks.h"

int main(int argc, char** argv) {
  return fsdp::benchmarks::RunGpuBenchmarks(argc, argv, fsdp::MakeCudaGraph);
}
