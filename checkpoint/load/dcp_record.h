// What a DCP checkpoint says of an optimizer, as our own checkpoints say it.
#ifndef CHECKPOINT_LOAD_DCP_RECORD_H_
#define CHECKPOINT_LOAD_DCP_RECORD_H_

#include <torch/optim/optimizer.h>

#include "absl/status/statusor.h"
#include "checkpoint/dcp/dcp_optimizer.h"
#include "checkpoint/run/run_values.h"
#include "checkpoint/run/training_json.h"

namespace fsdp::checkpoint {

// Groups, slots and numbers, for `optimizer`, which `values` have. Without
// groups in the files the optimizer's own stay. Flattened ones become its
// groups, where those of a group are alike.
//
// InvalidArgument lists all that does not fit: no optimizer in the files;
// states of another class; a parameter that lacks a state; options that are
// missing; options that LibTorch's class lacks and that change what a step does
// (maximize), or, if `strict`, that nobody knows.
absl::StatusOr<TrainingRecord> RecordOfDcp(
    const DcpOptimizer& stored, const RunValues& values,
    const torch::optim::Optimizer& optimizer, bool strict);

}  // namespace fsdp::checkpoint

#endif  // CHECKPOINT_LOAD_DCP_RECORD_H_
