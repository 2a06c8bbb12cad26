// Replicas whose ranks are threads, which die where a test wants it and come
// again.
#ifndef REPLICAS_TESTING_REPLICA_THREADS_H_
#define REPLICAS_TESTING_REPLICA_THREADS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "fsdp/options/options.h"
#include "replicas/membership/roster.h"

namespace fsdp::replicas::testing {

// The moment of a step at which a replica comes to its end.
enum class Moment {
  kBeforeBegin,
  kAfterBegin,
  kAfterBackward,
  kBeforeVote,  // one of its ranks has the sums
  kAfterVote,
  kAfterFinish,  // before its optimizer steps
};
inline constexpr int kNumMoments = 6;

// How it ends: it says so, as a program that returns an error does, or it falls
// silent, as one that is killed.
enum class End { kLeaves, kDies };

// Comes only once all replicas are back from an earlier one.
struct Loss {
  int64_t step = 0;  // or the first later step where it can come
  int replica = 0;
  int rank = 0;  // fails first; the replica's others follow
  Moment moment = Moment::kAfterBackward;
  End end = End::kDies;
};

struct ThreadsOptions {
  int replicas = 2;
  int ranks = 2;
  int64_t steps = 10;
  absl::Duration loss_timeout = absl::Seconds(1);
  // They are sorted by step.
  std::vector<Loss> losses;
  std::string history_folder;
  std::string replay;  // such a folder; only its losses come
  fsdp::Options sharding;
};

// A step as seen by those who finished it.
struct StepRecord {
  std::vector<ReplicaId> began;
  std::vector<ReplicaId> finished;
  // For each rank of a replica, shards and states of the optimizer, as bytes,
  // after the step.
  std::map<int, std::vector<std::string>> values;
};

struct ThreadsResult {
  absl::Status status;  // Internal: replicas contradict each other, or hang
  std::map<int64_t, StepRecord> steps;
  // Those of the first replica at the end, by name.
  std::map<std::string, at::Tensor> parameters;
  int losses = 0;  // that came to pass
};

// Returns the seed of the model with which a life begins. The model's state
// counts only if this life founds the run.
int SeedOf(const ReplicaId& id);
inline constexpr int64_t kDim = 5;
inline constexpr int kBlocks = 2;
// Returns a rank's data in a step of replica number `index` of `size`.
at::Tensor RowsOf(int64_t step, int index, int size, int rank, int ranks);

// Trains until all replicas say that the run is over; one that ends is started
// again at once, with another model.
ThreadsResult TrainReplicas(const ThreadsOptions& options);

}  // namespace fsdp::replicas::testing

#endif  // REPLICAS_TESTING_REPLICA_THREADS_H_
