// Computes the loss of a language model's head and its gradients, in chunks and
// with all logits at once.
//   ./bazelw run -c opt //examples/llama/model:chunked_loss_benchmark
//
// Arguments: tokens, and whether it computes in bfloat16. Counters: bytes that
// the allocator holds at most beyond hidden states and weight, bytes that all
// logits would take in the dtype, and tokens/s.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "benchmark/benchmark.h"
#include "examples/llama/model/chunked_loss.h"
#include "fsdp/testing/memory_meter.h"

namespace llama {
namespace {

constexpr int64_t kDim = 512, kVocab = 32000;

using LossOf = at::Tensor (*)(const at::Tensor& hidden,
                              const at::Tensor& weight,
                              const at::Tensor& targets);

at::Tensor Chunked(const at::Tensor& hidden, const at::Tensor& weight,
                   const at::Tensor& targets) {
  return ChunkedCrossEntropy(hidden, weight, targets);
}

at::Tensor AtOnce(const at::Tensor& hidden, const at::Tensor& weight,
                  const at::Tensor& targets) {
  return at::cross_entropy_loss(at::linear(hidden, weight), targets);
}

void BM_Loss(benchmark::State& state, LossOf loss_of) {
  const int64_t tokens = state.range(0);
  const c10::ScalarType dtype =
      state.range(1) != 0 ? c10::kBFloat16 : c10::kFloat;
  const at::Tensor hidden = at::randn({tokens, kDim}, dtype).requires_grad_();
  const at::Tensor weight = at::randn({kVocab, kDim}, dtype).requires_grad_();
  const at::Tensor targets = at::randint(kVocab, {tokens}, at::kLong);
  int64_t peak = 0;
  for (auto _ : state) {
    const auto meter = std::make_shared<fsdp::testing::MemoryMeter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    loss_of(hidden, weight, targets).backward();
    hidden.mutable_grad().reset();
    weight.mutable_grad().reset();
    peak = std::max(peak, meter->peak());
  }
  constexpr double kMega = 1e6;
  state.counters["peak_MB"] = static_cast<double>(peak) / kMega;
  state.counters["logits_MB"] =
      static_cast<double>(tokens * kVocab *
                          static_cast<int64_t>(c10::elementSize(dtype))) /
      kMega;
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(tokens),
                         benchmark::Counter::kIsIterationInvariantRate);
}

void Arguments(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"tokens", "bf16"})
      ->ArgsProduct({{512, 2048, 8192}, {0, 1}})
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(BM_Loss, chunked, Chunked)->Apply(Arguments);
BENCHMARK_CAPTURE(BM_Loss, at_once, AtOnce)->Apply(Arguments);

}  // namespace
}  // namespace llama
