// Times training steps whose shards, gradients and optimizer states rest on a
// device, and steps for which all of them rest in the host's memory.
#ifndef BENCHMARKS_GPU_OFFLOAD_RUN_H_
#define BENCHMARKS_GPU_OFFLOAD_RUN_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

#include "benchmarks/gpu_run.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

struct OffloadCase {
  int units = 8;
  int64_t dim = 4096;  // of the two square matrices of a unit
  int64_t rows = 4096;
  at::ScalarType dtype = at::kFloat;
  StepOn step_on = StepOn::kDevice;
};

// Runs both in turns, only on a device other than the CPU, where nothing would
// rest elsewhere. Figures:
//   ms, resident_ms          of forward, backward and optimizer, medians
//   optimizer_ms             of the optimizer alone
//   of_resident              the resident step's time over this one's
//   optimizer_of_resident    the same for the optimizer alone
//   GB/s                     to and from the host in a whole step, in which
//                            each use moves its bytes once
//   loss_difference          the largest, relative
//   peak_MB, resident_peak_MB  of the device, if it counts its memory
std::unique_ptr<TurnRun> MakeOffloadRun(const OffloadCase& what,
                                        const Place& place);

// Times the fused AdamW over the shards of a GPT beside device copies.
// Parameters, gradients and states are in `dtype`. Figures:
//   ms       of the optimizer's step, median
//   of_copy  bytes per second of a step, which reads four numbers and writes
//            three for each parameter, over those of a copy in the same turn
std::unique_ptr<TurnRun> MakeOptimizerRun(const gpt::GptConfig& model,
                                          at::ScalarType dtype,
                                          const Place& place);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_OFFLOAD_RUN_H_
