// Times training steps of a sharded GPT as a user would set them up: bf16 over
// fp32 shards, exact AdamW, parameters and states resting where they fit.
#ifndef BENCHMARKS_GPU_SHARDED_STEP_RUN_H_
#define BENCHMARKS_GPU_SHARDED_STEP_RUN_H_

#include <cstdint>
#include <memory>

#include "benchmarks/gpu_run.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

// Shards, their gradients and both states of AdamW are fp32; units compute in
// bf16 and reduce in fp32.
struct ShardedStepCase {
  gpt::GptConfig model;
  int64_t batch = 4;       // rows per backward
  int micro_batches = 1;   // backwards per step
  bool recompute = false;  // blocks keep only their inputs
  double clip = 0;         // the norm to which gradients are clipped; 0: none
  OffloadOptions offload;
};

// Figures:
//   ms               of a step, median
//   tokens_per_s, tokens_per_step
//   TFLOPS           6 x parameters x tokens per second, without recomputation
//                    and attention
//   parameters       their number in billions
//   first_loss, last_loss   warm-up included
// If something rests elsewhere:
//   optimizer_ms     of clipping and the optimizer alone, median
// If the device counts its memory:
//   peak_MB          within a step, activations included
std::unique_ptr<TurnRun> MakeShardedStepRun(const ShardedStepCase& what,
                                            const Place& place);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_SHARDED_STEP_RUN_H_
