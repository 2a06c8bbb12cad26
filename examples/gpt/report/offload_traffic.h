// Counts what moves between memory and disk in a stretch of a run.
#ifndef EXAMPLES_GPT_REPORT_OFFLOAD_TRAFFIC_H_
#define EXAMPLES_GPT_REPORT_OFFLOAD_TRAFFIC_H_

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "examples/gpt/report/report.h"
#include "fsdp/resting/offload_space.h"

namespace gpt {

// What has moved on all ranks since `before`, which were the stats() of `space`
// on this one. Collective.
absl::StatusOr<OffloadReport> ReportOffload(
    const fsdp::OffloadSpace& space, const fsdp::OffloadSpace::Stats& before,
    fsdp::comm::Communicator& communicator);

}  // namespace gpt

#endif  // EXAMPLES_GPT_REPORT_OFFLOAD_TRAFFIC_H_
