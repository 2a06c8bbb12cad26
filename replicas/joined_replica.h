// Takes one rank of a replica through the steps of a run.
#ifndef REPLICAS_JOINED_REPLICA_H_
#define REPLICAS_JOINED_REPLICA_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "replicas/column.h"
#include "replicas/live_log.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas {

struct JoinedReplicaOptions {
  ReplicaId self;
  int rank = 0;  // in the replica
  int64_t steps = 0;
  int64_t first_step = 0;
  // Limits each wait for others.
  absl::Duration timeout = absl::Minutes(5);
  // How long the log may take after a failure between replicas to say who is
  // lost.
  absl::Duration patience = absl::Seconds(30);
  // Returns whether the program is to end, in which case nobody is lost. May be
  // null.
  std::function<bool()> stop_requested;
};

// Does what the log says: connects the column in each epoch, hands the run over
// to new replicas, sums gradients, votes, and makes the sums means when the
// step is finished. After an error it is of no more use.
class JoinedReplica {
 public:
  // All outlive it. Somebody else ends `column` as soon as the log has another
  // epoch.
  JoinedReplica(const JoinedReplicaOptions& options, StepLog& log,
                Column& column, checkpoint::TrainingRun& run)
      : options_(options), log_(log), column_(column), run_(run) {}

  // Call these two in turns. BeginStep() returns the roster with which the step
  // begins, even if members are lost since; nothing when the run is over.
  absl::StatusOr<std::optional<Roster>> BeginStep();
  absl::Status FinishStep();

  // The roster that has finished the last finished step.
  const Roster& finished() const { return finished_; }

 private:
  int Index() const { return IndexOf(roster_, options_.self.replica); }
  bool IsNew() const { return roster_.members[Index()].is_new; }

  // Waits until the members of roster_, or of a later one of this step, are
  // connected and all have the state with which it begins.
  absl::Status Settle();
  absl::Status ConnectAll();
  absl::Status HandOverToNew();
  // Waits after `failure` between replicas until roster_ is without those who
  // are lost; or returns an error.
  absl::Status AwaitLoss(const absl::Status& failure);

  const JoinedReplicaOptions options_;
  StepLog& log_;
  Column& column_;
  checkpoint::TrainingRun& run_;
  Roster roster_;    // the newest that this rank has followed
  Roster finished_;  // see finished()
  int64_t settled_epoch_ = -1;
  std::unique_ptr<GradientMeans> means_;  // of settled_epoch_
};

}  // namespace fsdp::replicas

#endif  // REPLICAS_JOINED_REPLICA_H_
