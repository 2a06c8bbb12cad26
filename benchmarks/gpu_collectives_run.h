// Times collectives of tensors on a device beside copies of as many bytes
// there.
#ifndef BENCHMARKS_GPU_COLLECTIVES_RUN_H_
#define BENCHMARKS_GPU_COLLECTIVES_RUN_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "benchmarks/gpu_run.h"
#include "comm/communicator.h"

namespace fsdp::benchmarks {

enum class DeviceCollective { kAllGather, kReduceScatter };

// The tensors are float32, and not changed in place. `bytes` counts the whole
// tensor, a multiple of 4 per rank. A turn is several collectives in a row,
// then as many copies. Figures: GB/s of the whole tensor, and of_copy, the time
// of the copies over that of the collectives.
std::unique_ptr<TurnRun> MakeCollectiveRun(
    DeviceCollective collective, int64_t bytes, c10::Device device,
    std::shared_ptr<comm::Communicator> group);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_COLLECTIVES_RUN_H_
