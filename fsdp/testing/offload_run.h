// Trains the toy net with its tensors resting on given tiers, and records all
// results exactly.
#ifndef FSDP_TESTING_OFFLOAD_RUN_H_
#define FSDP_TESTING_OFFLOAD_RUN_H_

#include <torch/optim/optimizer.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {

using ToyModel = FullyShardedDataParallel<NetImpl>;

// A training, apart from where things rest.
struct OffloadScenario {
  std::string name;
  int world_size = 2;
  int replicas = 1;  // rows of the mesh
  int steps = 20;
  int backwards = 1;  // per step
  bool no_sync = false;
  bool step_in_backward = false;
  bool sgd = false;     // else AdamW
  double max_norm = 0;  // 0 for no clipping
  bool scaler = false;  // gradients are scaled
  bool zero_to_none = true;
  std::function<void(Options&)> configure = [](Options&) {};
  // Called before each step.
  std::function<absl::Status(ToyModel&, torch::optim::Optimizer&, int step)>
      before_step = [](ToyModel&, torch::optim::Optimizer&, int) {
        return absl::OkStatus();
      };
};

struct OffloadRecord {
  std::vector<double> losses;  // of this rank
  std::vector<double> norms;
  std::map<std::string, at::Tensor> tensors;  // parameters and states, whole
};

// Trains on this rank; all ranks must do the same.
absl::StatusOr<OffloadRecord> Train(const OffloadScenario& scenario,
                                    const comm::Mesh& mesh,
                                    const OffloadOptions& offload);

// Returns Internal with the first difference in any bit.
absl::Status CheckSameBits(const OffloadRecord& actual,
                           const OffloadRecord& expected);

}  // namespace fsdp::testing

#endif  // FSDP_TESTING_OFFLOAD_RUN_H_
