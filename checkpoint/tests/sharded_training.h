// Trains any of several models, by any optimizer, with all that a checkpoint
// has of it.
#ifndef CHECKPOINT_TESTS_SHARDED_TRAINING_H_
#define CHECKPOINT_TESTS_SHARDED_TRAINING_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/checkpointer.h"
#include "checkpoint/run/run.h"
#include "comm/communicator.h"
#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/training_step.h"
#include "fsdp/options/offload_options.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/trained_values.h"

namespace fsdp::checkpoint::testing {

enum class ModelKind { kToy, kTransformer, kBatchNorm, kOdd };
inline constexpr int kNumModelKinds = 4;

enum class NumberKind { kFloat32, kBFloat16, kMixed };
inline constexpr int kNumNumberKinds = 3;

// kAdamW and those before it have a fused counterpart.
enum class OptimizerKind { kSgd, kAdam, kAdamW, kAdagrad, kRmsprop };
inline constexpr int kNumOptimizerKinds = 5;

struct TrainingSetup {
  ModelKind model = ModelKind::kToy;
  NumberKind numbers = NumberKind::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  bool fused = false;  // of kAdagrad and kRmsprop: AdamW
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  Tier tier = Tier::kDevice;  // of all that rests; others than kDevice: fused
  bool units = true;          // else all is one
  bool averages = true;       // the weights
  std::string directory;      // of kSsd
};

inline constexpr ShardingStrategy kStrategies[] = {
    ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
    ShardingStrategy::kNoShard, ShardingStrategy::kHybridShard,
    ShardingStrategy::kHybridShardGradOp};
inline constexpr Tier kTiers[] = {Tier::kDevice, Tier::kCpu, Tier::kSsd};

// Which of each a run that saves and one that loads have.
struct SetupChoice {
  int model = 0;      // a ModelKind
  int numbers = 0;    // a NumberKind
  int optimizer = 0;  // an OptimizerKind
  int strategy = 0;   // of kStrategies
  int tier = 0;       // of kTiers
  int other_strategy = 0;
  int other_tier = 0;
  std::string directory;
};

// The one that saves, and the one that loads, which has the others. Both are
// fused where either has to be: they have one optimizer.
std::pair<TrainingSetup, TrainingSetup> SetupsOf(const SetupChoice& choice);

// Few rows of one choice, from 0, for each of `levels`, how many there are,
// such that any choices of any two levels are in one of the rows. The same each
// time.
std::vector<std::vector<int>> CoverPairs(const std::vector<int>& levels);

// "transformer, bfloat16, Adam, SHARD_GRAD_OP".
std::string ToString(const TrainingSetup& setup);

// Returns whether a step makes the same of an element wherever the shard that
// it is in begins. LibTorch adds a multiple of a bfloat16 tensor, which all
// steps but Adagrad's do, with one rounding in whole vectors of elements, and
// with two in what is left behind them: x.add_(y, alpha) rounds alpha * y
// there. Fused steps have kernels of their own.
bool StepsElementsAlike(const TrainingSetup& setup);

using ::fsdp::testing::CheckEqual;
using ::fsdp::testing::Values;

// On one rank. All ranks together see kRows rows a step, each its own.
class ShardedTraining {
 public:
  static constexpr int64_t kRows = 24;  // the number of ranks divides it

  static absl::StatusOr<std::unique_ptr<ShardedTraining>> Make(
      comm::Communicator& world, const TrainingSetup& setup = {}, int seed = 1);

  // The loss over the rows of all ranks.
  absl::StatusOr<double> Step(int step);

  // Without random states: ranks that are threads have them in common.
  TrainingRun AsRun();

  // By way of the state dicts, rank 0's buffers among them, and of the average;
  // learning rates; the scaler. A collective.
  absl::StatusOr<Values> Gather();
  // This rank's own.
  Values Buffers() const;

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  ShardedModuleBase& model() { return *model_; }

 private:
  ShardedTraining() = default;
  template <typename Net>
  absl::Status Shard(comm::Communicator& world, std::shared_ptr<Net> net,
                     const TrainingSetup& setup);
  absl::Status MakeModel(comm::Communicator& world, const TrainingSetup& setup,
                         int seed);

  std::shared_ptr<ShardedModuleBase> model_;
  // Returns the loss of the rows from `begin` on.
  std::function<at::Tensor(int64_t begin, int64_t rows)> loss_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<torch::optim::StepLR> scheduler_;
  std::unique_ptr<torch::optim::ReduceLROnPlateauScheduler> plateau_;
  std::optional<ShardedGradScaler> scaler_;
  std::optional<WeightAverage> average_;
};

// Returns when all ranks have called it. A collective.
absl::Status Meet(comm::Communicator& world);

// Internal unless the newest of `checkpoints` is that of `step` and has
// `values` when another training of `setup` has loaded it. A collective.
absl::Status CheckLatest(comm::Communicator& world, Checkpointer& checkpoints,
                         const TrainingSetup& setup, int64_t step,
                         const Values& values);

}  // namespace fsdp::checkpoint::testing

#endif  // CHECKPOINT_TESTS_SHARDED_TRAINING_H_
