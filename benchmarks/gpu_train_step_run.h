// Times training steps of a sharded GPT and of the same one in plain LibTorch.
#ifndef BENCHMARKS_GPU_TRAIN_STEP_RUN_H_
#define BENCHMARKS_GPU_TRAIN_STEP_RUN_H_

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>

#include "base/device_streams.h"
#include "benchmarks/gpu_run.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

struct TrainStepCase {
  gpt::GptConfig model;
  int64_t batch = 4;
  at::ScalarType dtype = at::kFloat;  // of parameters, gradients and states
  bool checkpointing = false;
  // If set, ours is captured, and its steps are replays
  // (fsdp/capture/step_capture.h).
  DeviceGraphMaker make_graph = nullptr;
};

// Runs forward, backward and a fused AdamW of each, in turns. Figures:
//   ms, plain_ms, of_plain  medians; of_plain is ours over plain in a turn
//   host_us_per_unit        until all of ours was queued, over the units
//   added_us_per_unit       the part of it that plain does not take
//   loss_difference         the largest, relative; with one rank only
//   of_plan                 the most bytes of gathered parameters and reduce
//                           buffers in use, over the plan's; absent if none
// If the device counts its memory:
//   reserved_of_plan        ours between steps over the plan's total
//   peak_MB, plain_peak_MB  within a step, activations included
std::unique_ptr<TurnRun> MakeTrainStepRun(const TrainStepCase& what,
                                          const Place& place);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_TRAIN_STEP_RUN_H_
