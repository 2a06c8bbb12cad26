// Hands a training run from the memory of one replica to others.
#ifndef REPLICAS_HANDOVER_H_
#define REPLICAS_HANDOVER_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"

namespace fsdp::replicas {

// Makes the runs of all `ranks` equal to that of `root`, to the bit:
// parameters, buffers, the optimizer's states and options, the average of the
// weights, schedulers, scaler and run.entries. Random states and rank_entries,
// which belong to a rank, stay as they are.
//
// `ranks` are one rank of each replica, all with the same shards. Collective.
// Call it between steps, or before the optimizer steps. Shards are sent as they
// are, one after the other, so that little more memory is needed than they
// take. Errors, on all ranks: InvalidArgument, with nothing changed, if the
// models or the optimizers differ. Other errors, also the communicator's, which
// is then aborted, leave runs partly filled.
absl::Status HandOver(comm::Communicator& ranks, int root,
                      checkpoint::TrainingRun& run, absl::Time deadline);

}  // namespace fsdp::replicas

#endif  // REPLICAS_HANDOVER_H_
