// The fused AdamW over the shards of a GPT beside device copies.
#ifndef BENCHMARKS_GPU_OPTIMIZER_RUN_H_
#define BENCHMARKS_GPU_OPTIMIZER_RUN_H_

#include <c10/core/ScalarType.h>

#include <memory>

#include "benchmarks/gpu_run.h"
#include "examples/gpt/flags/options.h"

namespace fsdp::benchmarks {

// Parameters, gradients and states in `dtype`. Figures:
//   ms       of the optimizer's step, median
//   of_copy  bytes per second of a step, which reads four numbers and writes
//            three for each parameter, over those of a copy in the same turn
std::unique_ptr<TurnRun> MakeOptimizerRun(const gpt::GptConfig& model,
                                          at::ScalarType dtype,
                                          const Place& place);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_OPTIMIZER_RUN_H_
