// All benchmarks for a GPU, which two programs run: gpu_benchmarks on a GPU,
// gpu_benchmarks_dry on the fake device. The device is an argument, so that the
// same code runs, and is tested, without a GPU.
#ifndef BENCHMARKS_GPU_BENCHMARKS_H_
#define BENCHMARKS_GPU_BENCHMARKS_H_

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/device_graph.h"
#include "comm/communicator.h"
#include "fsdp/deferred/deferred_init.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/model.h"

namespace fsdp::benchmarks {

// --- Parts that all of them share

// The device and the number of ranks of a benchmark.
struct Place {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int ranks = 1;
};

// The results of a benchmark, by name.
using Figures = std::map<std::string, double>;

// One of the contenders runs `run` again and again. It may return a loss. If
// `then` is set, it runs after it and is timed apart.
struct Repeated {
  std::function<at::Tensor()> run;
  std::function<void()> then = nullptr;
};

// One of those that run in turns, and what was measured of it.
class Contender {
 public:
  // Runs what `make` returns until it is warm.
  Contender(c10::Device device, int warm_up,
            const std::function<Repeated()>& make);

  void Run();

  // Seconds of each turn: until the host has queued all of it, until the device
  // has done it, and of `then` alone.
  std::vector<double> host, whole, then;
  std::vector<at::Tensor> losses;  // of the warm-up, too
  // Bytes that the device's allocator has given it, if that counts them:
  // between two runs, and the most within the last of the warm-up.
  bool counts_memory = false;
  int64_t resident_bytes = 0;
  int64_t peak_bytes = 0;

 private:
  c10::Device device_;
  Repeated repeated_;
};

// Contenders that run in turns, the one to be benchmarked first.
class TurnRun {
 public:
  using Contenders = std::vector<Contender>;

  // `figures` tells something of all turns so far, at least one. It throws
  // StatusError if the contenders did not do the same.
  TurnRun(Contenders contenders,
          std::function<Figures(const Contenders&)> figures)
      : contenders_(std::move(contenders)), figures_(std::move(figures)) {}

  // Runs all contenders once; returns the seconds of the first.
  double Turn() {
    for (Contender& contender : contenders_) contender.Run();
    return contenders_.front().whole.back();
  }
  Figures GetFigures() const { return figures_(contenders_); }

 private:
  Contenders contenders_;
  const std::function<Figures(const Contenders&)> figures_;
};

// Call it within a DeferredInit: moves the parameters of `module` to `device`
// and `dtype`, and records the initialization of its layers again for there.
// Knows linear layers, embeddings and layer norms. The device draws the values:
// the host takes seconds for a billion of them.
void DrawOn(c10::Device device, at::ScalarType dtype,
            torch::nn::Module& module);

// Returns what `make` returns, in `dtype` on the device of `place`, deferred:
// FullyShard() gives it values unit by unit, Materialize() all at once. The
// values are the same every time.
template <typename Make>
auto MakeOn(const Place& place, at::ScalarType dtype, const Make& make) {
  at::manual_seed(0);
  decltype(make()) module;
  {
    const DeferredInit deferred;
    module = make();
    DrawOn(place.device, dtype, *module);
  }
  return module;
}

// --- The benchmarks

// Training steps of a sharded GPT, and of the same one in plain LibTorch.
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

// Training steps of a sharded GPT as a user would set them up: bf16 over fp32
// shards, exact AdamW, parameters and states resting where they fit.
// Shards, their gradients and both states of AdamW are fp32; units reduce in
// fp32.
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

// Training steps whose shards, gradients and optimizer states rest in the
// host's memory, and steps for which all of them rest on a device.
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

// Is all of main(): reads flags (--device, --ranks, --turns, Google Benchmark's
// and those of models), runs the benchmarks, and returns the exit code, 2 if a
// flag is wrong or there is no such device. On a device, `graph` captures
// steps.
int RunGpuBenchmarks(int argc, char** argv, const DeviceGraphMaker& graph);

}  // namespace fsdp::benchmarks

#endif  // BENCHMARKS_GPU_BENCHMARKS_H_
