// Measures what recording a trace costs (fsdp/trace/trace.h), and what tracing
// costs when nobody records.
#include <ATen/record_function.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "benchmark/benchmark.h"
#include "fsdp/trace/trace.h"

namespace fsdp {
namespace {

// A trace is recorded if the argument is not zero.
std::unique_ptr<Trace> TraceIf(bool records) {
  if (!records) return nullptr;
  return ValueOrThrow(Trace::Start({/*rank=*/0, /*capacity=*/1 << 12}));
}

void BM_Span(benchmark::State& state) {
  const std::unique_ptr<Trace> trace = TraceIf(state.range(0) != 0);
  for (auto _ : state) const TraceSpan span("data");
}
BENCHMARK(BM_Span)->Arg(0)->Arg(1);

// Announces actions as the runtime does.
void BM_ScopeOfAnAction(benchmark::State& state) {
  const std::unique_ptr<Trace> trace = TraceIf(state.range(0) != 0);
  const std::string unit = "blocks.11";
  for (auto _ : state) {
    RECORD_USER_SCOPE(absl::StrCat("fsdp::WaitGather(", unit, ")"));
  }
}
BENCHMARK(BM_ScopeOfAnAction)->Arg(0)->Arg(1);

}  // namespace
}  // namespace fsdp
