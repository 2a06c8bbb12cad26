// One rank of a replica on its way through the steps of a run.
#ifndef REPLICAS_JOINED_REPLICA_H_
#define REPLICAS_JOINED_REPLICA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "replicas/column.h"
#include "replicas/gradient_means.h"
#include "replicas/history_file.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

struct JoinedReplicaOptions {
  ReplicaId self;
  int rank = 0;  // in the replica
  int64_t steps = 0;
  int64_t first_step = 0;
  // Of each wait for others.
  absl::Duration timeout = absl::Minutes(5);
  // After a failure between replicas: for the log to say who is lost.
  absl::Duration patience = absl::Seconds(30);
  // Whether the program is to end, so that nobody is lost; may be null.
  std::function<bool()> stop_requested;
};

// Carries out what the log says: connects the ranks of a column in each epoch,
// hands the run over to those who are new, sums gradients, votes, and makes
// them means once the step is finished. After an error it is of no more use.
class JoinedReplica {
 public:
  // All outlive it. `column` is ended by somebody else as soon as the log has
  // another epoch.
  JoinedReplica(const JoinedReplicaOptions& options, StepLog& log,
                Column& column, checkpoint::TrainingRun& run)
      : options_(options), log_(log), column_(column), run_(run) {}

  // In turns. The roster with which the step begins, also where members are
  // lost already; none: the run is over.
  absl::StatusOr<std::optional<Roster>> BeginStep();
  absl::Status FinishStep();

  // Of the last step that is finished: who has finished it.
  const Roster& finished() const { return finished_; }

 private:
  bool IsNew() const;
  int Index() const;

  // Until the members of roster_, or of a later one of this step, are connected
  // and all have the state that it begins with.
  absl::Status Settle();
  absl::Status ConnectAll();
  absl::Status HandOverToNew();
  absl::Status ReadLeaves();
  // After `failure` between replicas: roster_ without those who are lost; or
  // an error.
  absl::Status AwaitLoss(const absl::Status& failure);
  // Whether the step is finished; otherwise it is to be tried again.
  absl::StatusOr<bool> TryFinish();

  const JoinedReplicaOptions options_;
  StepLog& log_;
  Column& column_;
  checkpoint::TrainingRun& run_;
  Roster roster_;    // the newest that this rank has gone by
  Roster finished_;  // see finished()
  int64_t settled_epoch_ = -1;
  std::unique_ptr<GradientMeans> means_;  // of settled_epoch_
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_JOINED_REPLICA_H_
