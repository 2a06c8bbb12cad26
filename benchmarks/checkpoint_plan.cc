// Measures what one of very many ranks computes for a save, without the values:
// less than a second for 4,096 ranks and 10,000 parameters with two states
// each.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/check.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/tests/large_plan.h"

namespace fsdp::checkpoint {
namespace {

using ::fsdp::checkpoint::testing::LargePlan;

constexpr int64_t kMaxFileBytes = 5'000'000'000;

// Measures what each rank computes.
void BM_Plan(benchmark::State& state) {
  const LargePlan large(static_cast<int>(state.range(1)),
                        static_cast<int>(state.range(0)));
  const std::vector<TensorGroup> groups =
      large.PartsOf(static_cast<int>(state.range(0) / 2));
  for (auto _ : state) {
    const absl::StatusOr<SavePlan> plan = PlanSave(groups, {}, kMaxFileBytes);
    FSDP_CHECK(plan.ok());
    benchmark::DoNotOptimize(plan->ranges.size());
  }
}
BENCHMARK(BM_Plan)
    ->Args({8, 1000})
    ->Args({4096, 10'000})
    ->Unit(benchmark::kMillisecond);

// Measures what rank 0 computes from the reports of all ranks.
void BM_CombineReports(benchmark::State& state) {
  const auto ranks = static_cast<int>(state.range(0));
  const LargePlan large(static_cast<int>(state.range(1)), ranks);
  std::vector<Piece> pieces;
  std::vector<NamedSize> files;
  for (int rank = 0; rank < ranks; ++rank) {
    const absl::StatusOr<SavePlan> plan =
        PlanSave(large.PartsOf(rank), {}, kMaxFileBytes);
    FSDP_CHECK(plan.ok());
    for (size_t i = 0; rank == 0 && i < plan->files.size(); ++i) {
      const SaveFile& file = plan->files[i];
      files.push_back({file.name, file.bytes});
      AppendZeroPieces(static_cast<int64_t>(i), 0,
                       static_cast<int64_t>(file.head.size()), pieces);
    }
    for (const SaveRange& range : plan->ranges) {
      AppendZeroPieces(range.file, range.offset, range.bytes, pieces);
    }
  }
  for (auto _ : state) {
    FSDP_CHECK(CombinePieces(pieces, files).ok());
  }
  state.counters["pieces"] = static_cast<double>(pieces.size());
}
BENCHMARK(BM_CombineReports)
    ->Args({8, 1000})
    ->Args({4096, 200})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fsdp::checkpoint
