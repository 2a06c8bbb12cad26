// A training run from the memory of one replica into that of others.
#ifndef REPLICAS_HANDOVER_H_
#define REPLICAS_HANDOVER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"

namespace fsdp::replicas {

// Makes the runs of all of `ranks` that of `root`: parameters, buffers, the
// optimizer's states and options, the average of the weights, schedulers,
// scaler and run.entries, to the bit. What belongs to a rank, random states and
// rank_entries, stays.
//
// `ranks`: one rank of each replica, all with the same shards. Collective;
// shards travel as they are, one after the other, so that little more memory is
// needed than they take. Between steps, or before the optimizer steps.
// Errors, on all: InvalidArgument, with nothing changed: the models or the
// optimizers differ; otherwise, also of the communicator, which is then
// aborted, what is filled is filled in part.
absl::Status HandOver(comm::Communicator& ranks, int root,
                      checkpoint::TrainingRun& run, absl::Time deadline);

}  // namespace fsdp::replicas

#endif  // REPLICAS_HANDOVER_H_
