// All benchmarks for a GPU, which two programs run: gpu_benchmarks on a GPU,
// gpu_benchmarks_dry on the fake device.
#ifndef BENCHMARKS_GPU_BENCHMARKS_H_
#define BENCHMARKS_GPU_BENCHMARKS_H_

#include <functional>
#include <memory>

#include "base/device_streams.h"
#include "benchmarks/gpu_run.h"
#include "comm/communicator.h"

namespace fsdp::benchmarks {

using MakeGroup =
    std::function<std::shared_ptr<comm::Communicator>(const Place&)>;

// `nccl` makes a group of one rank, and is null if NCCL is not linked. `graph`
// captures steps, and is null if nothing can.
void AddGpuBenchmarks(const Place& place, int turns, const MakeGroup& nccl,
                      const DeviceGraphMaker& graph);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_BENCHMARKS_H_
