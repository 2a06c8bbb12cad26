// Generates tokens with a model of 26 M random parameters, with a cache and by
// computing all of the sequence again for each.
//   ./bazelw run -c opt //examples/llama/generation:generation_benchmark
//
// Arguments: tokens of the prompt, and whether it computes in bfloat16.
// Counters: parameters, tokens/s behind the prompt, as the caller sees them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

#include "base/status_error.h"
#include "benchmark/benchmark.h"
#include "examples/llama/model/attention.h"
#include "examples/llama/model/llama.h"
#include "examples/llama/model/llama_config.h"

namespace llama {
namespace {

constexpr int64_t kNewTokens = 64;

LlamaConfig Config() {
  return fsdp::ValueOrThrow(ParseLlamaConfig(R"({
      "model_type": "llama", "vocab_size": 8192, "hidden_size": 512,
      "intermediate_size": 1376, "num_hidden_layers": 6,
      "num_attention_heads": 8, "num_key_value_heads": 4})"));
}

struct Setting {
  explicit Setting(const benchmark::State& state)
      : model(Config()),
        dtype(state.range(1) != 0 ? c10::kBFloat16 : c10::kFloat),
        prompt(at::arange(state.range(0)).unsqueeze(0)) {
    InitializeParameters(*model, /*seed=*/1, /*stddev=*/0.02);
    model->to(dtype);
  }

  void Count(benchmark::State& state) {
    int64_t parameters = 0;
    for (const auto& parameter : model->parameters()) {
      parameters += parameter.numel();
    }
    state.counters["parameters"] = static_cast<double>(parameters);
    state.counters["tokens/s"] = benchmark::Counter(
        kNewTokens, benchmark::Counter::kIsIterationInvariantRate);
  }

  CausalLm model;
  c10::ScalarType dtype;
  at::Tensor prompt;
};

void BM_WithCache(benchmark::State& state) {
  const c10::NoGradGuard no_grad;
  Setting setting(state);
  KvCache cache = MakeKvCache(Config(), 1, setting.prompt.size(1) + kNewTokens,
                              setting.dtype);
  for (auto _ : state) {
    cache.tokens = 0;
    at::Tensor last = setting.prompt;
    for (int64_t i = 0; i < kNewTokens; ++i) {
      last = setting.model->Continue(last, cache).argmax(-1, true);
    }
  }
  setting.Count(state);
}

void BM_WithoutCache(benchmark::State& state) {
  const c10::NoGradGuard no_grad;
  Setting setting(state);
  for (auto _ : state) {
    at::Tensor all = setting.prompt;
    for (int64_t i = 0; i < kNewTokens; ++i) {
      const at::Tensor last = setting.model->forward(all).select(1, -1);
      all = at::cat({all, last.argmax(-1, true)}, 1);
    }
  }
  setting.Count(state);
}

void Arguments(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"prompt", "bf16"})
      ->ArgsProduct({{16, 256}, {0, 1}})
      ->UseRealTime()
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK(BM_WithCache)->Apply(Arguments);
BENCHMARK(BM_WithoutCache)->Apply(Arguments);

}  // namespace
}  // namespace llama
