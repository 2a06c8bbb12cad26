// Replicas of a training run that outlive each other.
//
// A job of R x N processes: R replicas, each of which trains the whole model,
// sharded over its own N ranks. When a rank dies, its replica leaves; the
// others finish the step with the mean over who is left and go on. When the
// replica is started again, it joins between two steps and takes model and
// optimizer from the memory of another one.
//
//   fsdp::checkpoint::TrainingRun run;  // model, optimizer, schedulers, ...
//   fsdp::ReplicaOptions options;
//   options.steps = 1000;
//   auto replicas = fsdp::ValueOrThrow(
//       fsdp::Replicas::Join(environment, &run, options));
//   while (auto step = fsdp::ValueOrThrow(replicas->BeginStep())) {
//     // This replica's part of the batch: step->index of step->size.
//     auto loss = Loss(model, step->step, step->index, step->size);
//     status = model->Backward(loss);
//     status = replicas->FinishStep();  // gradients: means over replicas
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// comm/run_ranks starts such a job on one host (`--replicas=2 --ranks=2`);
// elsewhere each replica is a job of its own (torchrun, --ranks) with
// FSDP_REPLICA, FSDP_REPLICAS, FSDP_REPLICA_INCARNATION and FSDP_REPLICA_STORE,
// the address of a tools/keeper. Without them there is one replica, and this
// costs nothing.
#ifndef REPLICAS_REPLICAS_H_
#define REPLICAS_REPLICAS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/run/run.h"
#include "comm/bootstrap/bootstrap.h"
#include "comm/startup/environment.h"

namespace fsdp {

// Options of Replicas. The same on all ranks of all replicas, but `first_step`.
struct ReplicaOptions {
  // The number of steps of the run. A replica that comes later does nothing.
  int64_t steps = 0;
  // The steps that this replica has done, as loaded from a checkpoint. They
  // count when the run begins: all take the state of a replica that is
  // furthest.
  int64_t first_step = 0;

  // How long the beginning of a run waits for all replicas; after that those
  // that are there begin.
  absl::Duration found_timeout = absl::Minutes(1);
  // A replica is lost when one of its ranks has given no sign of life for so
  // long, or at once if its end is noticed otherwise.
  absl::Duration loss_timeout = absl::Seconds(10);
  // A replica is lost if it has not finished a step so long after the first
  // replica has; zero: never. Nothing else notices live ranks that hang.
  absl::Duration step_timeout = absl::ZeroDuration();

  // A folder, of this run alone, where each replica appends who took part in
  // which steps, in "replica-0.txt" and so on. Empty: nowhere.
  std::string history_folder;
  // Such a folder of an earlier run. Replicas then take part and are lost as
  // they were in it, and end with its bits. A replica that is lost ends with
  // Aborted and must be started again; any other loss ends all with an error.
  // BeginStep() refuses a life of which the history has no step by
  // InvalidArgument: whoever comes to the run's end has gone through its steps.
  // Empty: no replay.
  std::string replay;

  // Backend, device and timeouts of the groups between replicas.
  comm::ConnectOptions between;
};

// One rank's part in a run of replicas. All ranks of a replica make the same
// calls, from one thread. After an error of one rank its replica's ranks must
// end, so that it can be started again. The destructor tells the other
// replicas.
class Replicas {
 public:
  // Waits for the keeper only. `run`, which replicas hand over, outlives this.
  // The model is sharded over the ranks of this replica by any strategy, with
  // the same options in all replicas. InvalidArgument: bad options, a run
  // without model or optimizer, or an environment without what replicas need.
  // Unavailable, DeadlineExceeded, PermissionDenied: the keeper does not
  // answer.
  static absl::StatusOr<std::unique_ptr<Replicas>> Join(
      const comm::Environment& environment, checkpoint::TrainingRun* run,
      const ReplicaOptions& options);
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;
  virtual ~Replicas() = default;

  // A step to compute, and this replica's part in it.
  struct Step {
    int64_t step;  // from 0
    int index;     // 0 <= index < size
    int size;      // how many replicas take part
  };
  // Waits until this replica takes part in a step, and returns it, or nothing
  // if the run is over; the same on all ranks of a replica. Only a replica that
  // has just come has to wait; `run` then has the state of another one, if
  // there was any.
  virtual absl::StatusOr<std::optional<Step>> BeginStep() = 0;

  // Call this after backward, before gradients are clipped and the optimizer
  // steps. Sets the gradients of the optimizer's parameters to their means over
  // the replicas that finish this step, which may be fewer than began it, never
  // more. OK: the step is done for good, in all of them alike. After an error
  // the step is not this replica's; Aborted: the replica was given up as lost.
  virtual absl::Status FinishStep() = 0;

  // The number of steps that this replica's model has gone through: those of
  // the run, unless the replica has come after the last one and got no state.
  virtual int64_t steps_done() const = 0;
  // "0.1 2.3": the replicas that have finished the last step, each with its
  // incarnation.
  virtual std::string Members() const = 0;

 protected:
  Replicas() = default;
};

}  // namespace fsdp

#endif  // REPLICAS_REPLICAS_H_
