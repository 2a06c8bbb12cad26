// Files of a plan, straight from where their bytes are.
#ifndef CHECKPOINT_SAVE_PLAN_WRITER_H_
#define CHECKPOINT_SAVE_PLAN_WRITER_H_

#include "absl/status/status.h"
#include "checkpoint/files/range_writer.h"
#include "checkpoint/save/save_plan.h"

namespace fsdp::checkpoint {

// The first files of the writer are the plan's `files`, and `own` the next.

// Makes all of `files` as large as they will be, and writes what they begin
// with: what rank 0 does.
absl::Status WriteHeads(const SavePlan& plan, RangeWriter& writer);

// Writes what this rank's own files begin with.
absl::Status WriteOwnHeads(const SavePlan& plan, RangeWriter& writer);

// Writes all of `plan.ranges` while they are read; values that rest elsewhere
// are in memory one unit at a time.
absl::Status WriteLive(const SavePlan& plan, RangeWriter& writer);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_SAVE_PLAN_WRITER_H_
