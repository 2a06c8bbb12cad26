// Trains the toy net sharded, and in one process on the rows of all ranks.
#ifndef FSDP_TESTING_PLAIN_ORACLE_H_
#define FSDP_TESTING_PLAIN_ORACLE_H_

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {

struct TrainingPlan {
  int64_t dim = 7;
  int blocks = 3;
  int64_t rows = 4;  // per rank and backward
  int steps = 5;
  // The backwards of each step; with `no_sync` all but the last run under
  // NoSync.
  int backwards = 1;
  bool no_sync = false;
  bool adam = true;  // else SGD with momentum
  bool step_in_backward = false;
  // Called after sharding.
  std::function<absl::Status(ShardedModuleBase&)> prepare;
};

// Losses are means over the step's rows.
struct TrainingRecord {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> parameters;  // afterwards
};

// Trains in one process on the rows of all ranks.
TrainingRecord TrainPlain(const TrainingPlan& plan, int world_size);

// Trains sharded; `losses` are those of all ranks. Returns an error if
// something gathered is left.
absl::Status TrainSharded(const TrainingPlan& plan, const comm::Mesh& mesh,
                          const Options& options, TrainingRecord* record);

// Returns Internal with the first difference beyond the bounds.
absl::Status CheckSameTraining(const TrainingRecord& actual,
                               const TrainingRecord& expected,
                               double relative = 1e-4, double absolute = 1e-5);

// Compares TrainSharded() over `mesh` with TrainPlain().
absl::Status CheckAgainstPlain(const TrainingPlan& plan, const comm::Mesh& mesh,
                               const Options& options, double relative = 1e-4,
                               double absolute = 1e-5);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_PLAIN_ORACLE_H_
