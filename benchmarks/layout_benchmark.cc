// Measures laying out a unit's parameters and asking where they are.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "benchmark/benchmark.h"
#include "flat_param/layout.h"

namespace fsdp::flat_param {
namespace {

constexpr int kWorldSize = 8;
constexpr int64_t kElementSize = 4;

// Returns matrices and vectors in turn, as in a transformer block.
std::vector<ParameterSpec> Parameters(int64_t count) {
  std::vector<ParameterSpec> parameters;
  parameters.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    std::string name = absl::StrCat("blocks.", i / 12, ".parameter.", i % 12);
    if (i % 2 == 0) {
      parameters.push_back({std::move(name), {512, 511}, {511, 1}});
    } else {
      parameters.push_back({std::move(name), {511}, {1}});
    }
  }
  return parameters;
}

FlatLayout Layout(int64_t num_parameters) {
  absl::StatusOr<FlatLayout> layout =
      FlatLayout::Create(Parameters(num_parameters), kElementSize, kWorldSize);
  FSDP_CHECK(layout.ok());
  return *std::move(layout);
}

void CountParameters(benchmark::State& state, int64_t per_iteration) {
  state.counters["parameters/s"] =
      benchmark::Counter(static_cast<double>(per_iteration),
                         benchmark::Counter::kIsIterationInvariantRate);
}

// Includes the copy of the parameters' descriptions that the layout keeps.
void BM_Create(benchmark::State& state) {
  const std::vector<ParameterSpec> parameters = Parameters(state.range(0));
  for (auto _ : state) {
    absl::StatusOr<FlatLayout> layout =
        FlatLayout::Create(parameters, kElementSize, kWorldSize);
    benchmark::DoNotOptimize(layout);
  }
  CountParameters(state, state.range(0));
}
BENCHMARK(BM_Create)->Arg(12)->Arg(1'000)->Arg(50'000);

// Asks what one rank asks about all its parameters.
void BM_Query(benchmark::State& state) {
  const FlatLayout layout = Layout(state.range(0));
  int rank = 0;
  for (auto _ : state) {
    for (int i = 0; i < layout.num_parameters(); ++i) {
      benchmark::DoNotOptimize(layout.InShard(i, rank));
      benchmark::DoNotOptimize(layout.InParameter(i, rank));
    }
    rank = (rank + 1) % kWorldSize;
  }
  CountParameters(state, state.range(0));
}
BENCHMARK(BM_Query)->Arg(12)->Arg(1'000)->Arg(50'000);

}  // namespace
}  // namespace fsdp::flat_param
