// Measures one step of AdamW over shards: 25 M parameters, cut into slices of
// one tensor, with their gradients in another.
//   ./bazelw run -c opt //benchmarks:optimizer_benchmark
//
// The argument is the number of slices. Counters: GB/s with 28 bytes per
// element (parameter and both averages are read and written, the gradient is
// read), and its ratio to the GB/s of a[i] += b[i] over arrays of this size,
// which alternates with the steps so that both see the same noise.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "benchmarks/measure.h"
#include "fsdp/optim/fused_optimizer.h"

namespace fsdp {
namespace {

constexpr int64_t kNumel = 25'000'000;
constexpr int64_t kBytesPerElement = 28;
constexpr int64_t kBytesPerElementOfSum = 12;

// Slices begin next to each other, or at multiples of four elements as in a
// flat shard of parameters of odd sizes.
enum Layout { kNeighbours, kGaps };

struct Slices {
  Slices(int64_t count, Layout layout) {
    const at::Tensor values = at::randn({kNumel});
    const at::Tensor gradients = at::randn({kNumel});
    const int64_t pitch = kNumel / count / 4 * 4;
    const int64_t size = layout == kGaps ? pitch - 1 : pitch;
    for (int64_t i = 0; i < count; ++i) {
      leaves.push_back(
          values.narrow(0, i * pitch, size).detach().requires_grad_());
      leaves.back().mutable_grad() =
          gradients.narrow(0, i * pitch, size).detach();
      numel += size;
    }
  }

  std::vector<at::Tensor> leaves;
  int64_t numel = 0;
};

using Step = std::function<void()>;

template <typename Optimizer>
Step StepOf(const Slices& slices) {
  auto optimizer = std::make_shared<Optimizer>(slices.leaves);
  return [optimizer] { optimizer->step(); };
}

// Gives every slice to the kernel by itself.
Step KernelPerSlice(const Slices& slices) {
  std::vector<at::Tensor> gradients, means, squares, steps;
  for (const at::Tensor& leaf : slices.leaves) {
    gradients.push_back(leaf.grad());
    means.push_back(at::zeros_like(leaf.detach()));
    squares.push_back(at::zeros_like(leaf.detach()));
    steps.push_back(at::zeros({}));
  }
  return [=, leaves = slices.leaves]() mutable {
    const c10::NoGradGuard no_grad;
    for (at::Tensor& step : steps) step.add_(1);
    at::_fused_adamw_(leaves, gradients, means, squares, {}, steps, 1e-3, 0.9,
                      0.999, 1e-2, 1e-8, false, false);
  };
}

void BM_AdamW(benchmark::State& state, Step (*make)(const Slices&),
              Layout layout) {
  at::set_num_threads(1);
  const Slices slices(state.range(0), layout);
  const Step step = make(slices);
  const at::Tensor sum = at::zeros({slices.numel});
  const at::Tensor addend = at::zeros({slices.numel});
  step();
  sum.add_(addend);
  std::vector<double> step_seconds, sum_seconds;
  for (auto _ : state) {
    step_seconds.push_back(Seconds(step));
    state.SetIterationTime(step_seconds.back());
    sum_seconds.push_back(Seconds([&] { sum.add_(addend); }));
  }
  const auto numel = static_cast<double>(slices.numel);
  const double speed = numel * kBytesPerElement / 1e9 / Median(step_seconds);
  const double bound =
      numel * kBytesPerElementOfSum / 1e9 / Median(sum_seconds);
  state.counters["GB/s"] = speed;
  state.counters["of_memory"] = speed / bound;
}

#define ADAMW(name, make, layout)                 \
  BENCHMARK_CAPTURE(BM_AdamW, name, make, layout) \
      ->Arg(100)                                  \
      ->Arg(2000)                                 \
      ->UseManualTime()                           \
      ->Unit(benchmark::kMillisecond)

ADAMW(fused, StepOf<FusedAdamW>, kNeighbours);
ADAMW(fused_with_gaps, StepOf<FusedAdamW>, kGaps);
ADAMW(kernel_per_slice, KernelPerSlice, kNeighbours);
ADAMW(kernel_per_slice_with_gaps, KernelPerSlice, kGaps);
ADAMW(torch, StepOf<torch::optim::AdamW>, kNeighbours);

}  // namespace
}  // namespace fsdp
