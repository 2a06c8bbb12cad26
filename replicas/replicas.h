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
// elsewhere each replica is a job of its own (torchrun, --ranks), with
// FSDP_REPLICA, FSDP_REPLICAS, FSDP_REPLICA_INCARNATION and
// FSDP_REPLICA_STORE, the place of a tools/keeper. Without them there is one
// replica, and all of this costs nothing.
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

// The same on all ranks of all replicas, but `first_step`.
struct ReplicaOptions {
  // How many steps the run has; a replica that comes later does nothing.
  int64_t steps = 0;
  // How many are done: what this replica has loaded from a checkpoint. Counts
  // where a run begins; all take the state of a replica that is furthest.
  int64_t first_step = 0;

  // Replicas to wait for where a run begins; after found_timeout those that
  // are there begin.
  absl::Duration found_timeout = absl::Minutes(1);
  // A replica is lost once one of its ranks has given no sign of life for this
  // long. Where its end is noticed otherwise, that is at once.
  absl::Duration loss_timeout = absl::Seconds(10);
  // A replica is lost that has not finished a step so long after the first one
  // has; zero: never. Live ranks that hang cannot be noticed otherwise.
  absl::Duration step_timeout = absl::ZeroDuration();

  // Where each replica appends who took part in which steps, as
  // "replica-0.txt"; of this run alone. Empty: nowhere.
  std::string history_folder;
  // Such a folder: replicas take part, and are lost, as they were in that run,
  // and end with its bits. One that is lost ends with Aborted, and has to be
  // started again; any other loss ends all with an error, and BeginStep()
  // refuses a life that the history has no step of with InvalidArgument: who
  // comes to the end of the run has gone through its steps. Empty: no replay.
  std::string replay;

  // Of the groups between replicas: backend, device, timeouts.
  comm::ConnectOptions between;
};

// One rank's. All ranks of a replica make the same calls, from one thread. An
// error of one rank is the end of its replica: what ranks do then is end, so
// that the replica can be started again. Its destructor tells the others.
class Replicas {
 public:
  // `run` is what replicas hand over, and outlives this. The model is sharded
  // over the ranks of this replica by any strategy, with the same options in
  // all replicas. Waits for the keeper only.
  // InvalidArgument: options, or a run without model or optimizer, or an
  // environment without what replicas need. Unavailable, DeadlineExceeded,
  // PermissionDenied: no keeper there.
  static absl::StatusOr<std::unique_ptr<Replicas>> Join(
      const comm::Environment& environment, checkpoint::TrainingRun* run,
      const ReplicaOptions& options);
  Replicas(const Replicas&) = delete;
  Replicas& operator=(const Replicas&) = delete;
  ~Replicas();

  // A step that is to be computed, and this replica's part in it.
  struct Step {
    int64_t step;  // from 0
    int index;     // 0 <= index < size
    int size;      // how many replicas take part
  };
  // Waits until this replica takes part in a step, which is at once but where
  // it has just come: then `run` has been filled by another one, if there was
  // any. None: the run is over. The same on all ranks of a replica.
  absl::StatusOr<std::optional<Step>> BeginStep();

  // After backward, before gradients are clipped and the optimizer steps: the
  // gradients of the optimizer's parameters become the means over the replicas
  // that finish this step, which may be fewer than began it, never more. OK:
  // the step is done for good, in all of them alike. Errors: the step is not
  // this replica's; Aborted: it has been given up for lost.
  absl::Status FinishStep();

  // How many steps of the run this replica's model has gone through: those of
  // the run, unless it has come after the last one and was given nothing.
  int64_t steps_done() const;
  // "0.1 2.3": replicas that have finished the last step, each with its
  // incarnation.
  std::string Members() const;

 private:
  class Impl;
  explicit Replicas(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp

#endif  // REPLICAS_REPLICAS_H_
