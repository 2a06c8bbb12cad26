// Counts what moves between memory and disk in a stretch of a run.
#ifndef TESTING_GPT_REPORT_OFFLOAD_TRAFFIC_H_
#define TESTING_GPT_REPORT_OFFLOAD_TRAFFIC_H_

#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "fsdp/resting/offload_space.h"
#include "testing/gpt/report/report.h"

namespace gpt {

// Returns what has moved on all ranks since `before`, which were the stats() of
// `space` on this one. Collective.
absl::StatusOr<OffloadReport> ReportOffload(
    const fsdp::OffloadSpace& space, const fsdp::OffloadStats& before,
    fsdp::comm::Communicator& communicator);

}  // namespace gpt

#endif  // TESTING_GPT_REPORT_OFFLOAD_TRAFFIC_H_
