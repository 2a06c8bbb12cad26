#include "testing/gpt/report/offload_traffic.h"

#include <cstdint>
#include <vector>

#include "base/status_macros.h"
#include "fsdp/options/offload_options.h"
#include "testing/gpt/report/rank_numbers.h"

namespace gpt {

using ::fsdp::kNumRestingKinds;

absl::StatusOr<OffloadReport> ReportOffload(
    const fsdp::OffloadSpace& space, const fsdp::OffloadStats& before,
    fsdp::comm::Communicator& communicator) {
  const fsdp::OffloadStats now = space.stats();
  const double waited =
      now.memory.waited_seconds - before.memory.waited_seconds;
  std::vector<int64_t> mine = {static_cast<int64_t>(waited * 1e6)};
  for (int kind = 0; kind < kNumRestingKinds; ++kind) {
    mine.push_back(now.stores[kind].reads.bytes -
                   before.stores[kind].reads.bytes);
    mine.push_back(now.stores[kind].writes.bytes -
                   before.stores[kind].writes.bytes);
  }
  FSDP_ASSIGN_OR_RETURN(
      const std::vector<std::vector<int64_t>> by_rank,
      GatherNumbers(mine, "bytes read and written", communicator));
  OffloadReport report;
  report.plan = space.plan();
  for (const std::vector<int64_t>& numbers : by_rank) {
    report.waited_seconds.push_back(static_cast<double>(numbers[0]) / 1e6);
    for (int kind = 0; kind < kNumRestingKinds; ++kind) {
      report.bytes_read[kind] += numbers[1 + 2 * kind];
      report.bytes_written[kind] += numbers[2 + 2 * kind];
    }
  }
  return report;
}

}  // namespace gpt
