// Trains a step of adapters on two ranks, which are threads, whose base rests
// in bfloat16 or in int8.
//   ./bazelw run -c opt //examples/llama/training:adapter_benchmark
//
// Argument: whether the base is int8. Counters of rank 0: bytes that are
// planned (PlanMemory()), bytes that the allocator holds between steps and at
// most in one, and tokens/s of both ranks.
#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "adapters/lora.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "comm/communicator.h"
#include "comm/testing/run_ranks.h"
#include "examples/llama/data/token_batches.h"
#include "examples/llama/model/llama_config.h"
#include "examples/llama/testing/numbered_rows.h"
#include "examples/llama/training/model.h"
#include "examples/llama/training/trainer.h"
#include "fsdp/testing/memory_meter.h"

namespace llama {
namespace {

using ::fsdp::comm::Communicator;

constexpr int64_t kSeq = 128, kBatch = 4, kSteps = 5;
constexpr int kRanks = 2;

LlamaConfig Config() {
  return fsdp::ValueOrThrow(ParseLlamaConfig(R"({
      "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
      "intermediate_size": 1376, "num_hidden_layers": 8,
      "num_attention_heads": 8, "num_key_value_heads": 4})"));
}

struct Figures {
  int64_t planned = 0;
  int64_t held = 0;
  int64_t peak = 0;
  absl::Duration steps;  // without the first one, which allocates
};

absl::Status Train(Communicator& world, bool is_int8, Figures* figures) {
  const auto meter = std::make_shared<fsdp::testing::MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  ModelOptions options;
  options.compute = c10::kBFloat16;
  options.lora.emplace().targets = {fsdp::adapters::kAllLinear};
  if (is_int8) options.int8_base.emplace();
  const std::shared_ptr<Communicator> own(&world, [](Communicator*) {});
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(Config(), options, own));
  FSDP_ASSIGN_OR_RETURN(
      TokenBatches data,
      TokenBatches::Create(std::make_shared<NumberedRows>(4 * kBatch, kSeq),
                           {kBatch, world.rank(), kRanks}, /*seed=*/1));
  Trainer trainer(model, &data, own, TrainerOptions());
  FSDP_RETURN_IF_ERROR(trainer.Step(0).status());
  figures->held = meter->live();
  meter->TakePeak();
  const absl::Time begin = absl::Now();
  for (int64_t step = 1; step <= kSteps; ++step) {
    FSDP_RETURN_IF_ERROR(trainer.Step(step).status());
  }
  figures->steps = absl::Now() - begin;
  figures->peak = meter->peak();
  figures->planned = model->PlanMemory().total();
  return absl::OkStatus();
}

void BM_AdapterSteps(benchmark::State& state) {
  const bool is_int8 = state.range(0) != 0;
  at::set_num_threads(1);
  Figures first;
  for (auto _ : state) {
    fsdp::ThrowIfError(fsdp::comm::testing::AllOk(fsdp::comm::testing::RunRanks(
        kRanks,
        [&](Communicator& world) {
          Figures other;
          return Train(world, is_int8, world.rank() == 0 ? &first : &other);
        },
        absl::Minutes(10))));
    state.SetIterationTime(absl::ToDoubleSeconds(first.steps));
  }
  constexpr double kMega = 1e6;
  state.counters["planned_MB"] = static_cast<double>(first.planned) / kMega;
  state.counters["held_MB"] = static_cast<double>(first.held) / kMega;
  state.counters["peak_MB"] = static_cast<double>(first.peak) / kMega;
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(kSteps * kBatch * kSeq),
                         benchmark::Counter::kIsIterationInvariantRate);
}

BENCHMARK(BM_AdapterSteps)
    ->ArgName("int8")
    ->Arg(0)
    ->Arg(1)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace llama
