// One step of AdamW over shards: 25 M parameters, cut into slices of one
// tensor, with their gradients in another.
//   ./bazelw run -c opt //benchmarks:optimizer_benchmark
//
// Counters: GB/s with 28 bytes per element (parameter and both averages are
// read and written, the gradient is read), and its ratio to what a loop that
// reads and writes as much without computing reaches, which alternates with
// the steps so that both see the same noise.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "benchmark/benchmark.h"
#include "fsdp/fused_optimizer.h"

namespace fsdp {
namespace {

constexpr int64_t kNumel = 25'000'000;
constexpr int64_t kBytesPerElement = 28;

// Where slices begin: next to each other, or at multiples of four elements as
// in a flat shard of parameters of odd sizes.
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

Step Fused(const Slices& slices) {
  auto optimizer = std::make_shared<FusedAdamW>(slices.leaves);
  return [optimizer] { optimizer->step(); };
}

Step Torch(const Slices& slices) {
  auto optimizer = std::make_shared<torch::optim::AdamW>(slices.leaves);
  return [optimizer] { optimizer->step(); };
}

// The kernel, given every slice by itself.
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

// Reads four arrays and writes three, as the step does.
class MemoryBound {
 public:
  explicit MemoryBound(int64_t numel) : numel_(numel) {
    for (at::Tensor& array : arrays_) array = at::zeros({numel});
  }
  void Run() {
    float* a = arrays_[0].mutable_data_ptr<float>();
    float* b = arrays_[1].mutable_data_ptr<float>();
    float* c = arrays_[2].mutable_data_ptr<float>();
    const float* d = arrays_[3].const_data_ptr<float>();
    at::parallel_for(0, numel_, 1 << 16, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        a[i] += d[i];
        b[i] += d[i];
        c[i] += d[i];
      }
    });
    benchmark::ClobberMemory();
  }

 private:
  const int64_t numel_;
  at::Tensor arrays_[4];
};

double Seconds(const Step& step) {
  const absl::Time begin = absl::Now();
  step();
  return absl::ToDoubleSeconds(absl::Now() - begin);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2,
                   values.end());
  return values[values.size() / 2];
}

void BM_AdamW(benchmark::State& state, Step (*make)(const Slices&),
              Layout layout) {
  const Slices slices(state.range(0), layout);
  const Step step = make(slices);
  MemoryBound bound(slices.numel);
  step();
  bound.Run();
  std::vector<double> step_seconds, bound_seconds;
  for (auto _ : state) {
    step_seconds.push_back(Seconds(step));
    state.SetIterationTime(step_seconds.back());
    bound_seconds.push_back(Seconds([&] { bound.Run(); }));
  }
  const double gigabytes = slices.numel * kBytesPerElement / 1e9;
  state.counters["GB/s"] = gigabytes / Median(step_seconds);
  state.counters["of_memory"] = Median(bound_seconds) / Median(step_seconds);
}

#define ADAMW(name, make, layout)                    \
  BENCHMARK_CAPTURE(BM_AdamW, name, &(make), layout) \
      ->Arg(100)                                     \
      ->Arg(2000)                                    \
      ->UseManualTime()                              \
      ->Unit(benchmark::kMillisecond)

ADAMW(fused, Fused, kNeighbours);
ADAMW(fused_with_gaps, Fused, kGaps);
ADAMW(kernel_per_slice, KernelPerSlice, kNeighbours);
ADAMW(kernel_per_slice_with_gaps, KernelPerSlice, kGaps);
ADAMW(torch, Torch, kNeighbours);

// What a step costs on the host besides the kernel: slices of 16 elements.
void BM_HostCost(benchmark::State& state) {
  const int64_t count = state.range(0);
  const at::Tensor values = at::randn({16 * count});
  const at::Tensor gradients = at::randn({16 * count});
  std::vector<at::Tensor> leaves;
  for (int64_t i = 0; i < count; ++i) {
    leaves.push_back(values.narrow(0, 16 * i, 16).detach().requires_grad_());
    leaves.back().mutable_grad() = gradients.narrow(0, 16 * i, 16).detach();
  }
  FusedAdamW optimizer(leaves);
  for (auto _ : state) optimizer.step();
  state.counters["per_slice"] = benchmark::Counter(
      static_cast<double>(state.iterations() * count),
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}
BENCHMARK(BM_HostCost)
    ->Arg(1)
    ->Arg(100)
    ->Arg(1000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fsdp
