// Fused optimizers over the shards of models.
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>

#include "fsdp/fully_sharded_data_parallel.h"
#include "fsdp/optim/fused_optimizer.h"
#include "fsdp/options/options.h"
#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int64_t kDim = 11;
constexpr int kBlocks = 2;
constexpr int64_t kRows = 12;  // of all ranks together
constexpr int kSteps = 6;

using Model = FullyShardedDataParallel<NetImpl>;

absl::StatusOr<Model> MakeModel(Communicator& world,
                                const Options& options = BlockUnits()) {
  return FullyShard(MakeNet(kDim, kBlocks), Unowned(world), options);
}

absl::Status Backward(Model& model, const at::Tensor& x) {
  return model->Backward(Loss(model->forward(x), x));
}

at::Tensor PartOf(const Communicator& world, int step) {
  const int64_t rows = kRows / world.world_size();
  return Rows(step * kRows + world.rank() * rows, rows, kDim);
}

absl::Status ExpectEqualShards(const Model& actual, const Model& expected) {
  for (size_t i = 0; i < expected->Ranges().size(); ++i) {
    const TensorRange& named = actual->Ranges()[i];
    EXPECT_TRUE(at::equal(named.values, expected->Ranges()[i].values))
        << named.name;
  }
  return absl::OkStatus();
}

// Trains with equal rows on all ranks: sums of two or four equal numbers are
// exact, so gradients equal those of one rank.
absl::StatusOr<StateDict> TrainedOnEqualRows(Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
  auto optimizer = MakeOptimizer<FusedAdamW>(*model, AdamWOptions(1e-2));
  FSDP_RETURN_IF_ERROR(CheckOptimizer(*model, optimizer));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(Backward(model, Rows(int64_t{5} * step, 5, kDim)));
    optimizer.step();
  }
  return model->GatherStateDict();
}

TEST(FusedModelTest, GivesTheBitsOfOneRankOnMore) {
  StateDict expected;
  EXPECT_OK(RunAllRanks(1, [&](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(expected, TrainedOnEqualRows(world));
    return absl::OkStatus();
  }));
  for (const int world_size : {2, 4}) {
    EXPECT_OK(RunAllRanks(world_size, [&](Communicator& world) -> absl::Status {
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, TrainedOnEqualRows(world));
      for (const auto& item : expected) {
        EXPECT_TRUE(at::equal(dict[item.key()], item.value())) << item.key();
      }
      return absl::OkStatus();
    })) << world_size;
  }
}

template <typename Optimizer, typename OptimizerOptions>
absl::Status CheckInBackward(Communicator& world,
                             const OptimizerOptions& options) {
  FSDP_ASSIGN_OR_RETURN(Model inside, MakeModel(world));
  FSDP_ASSIGN_OR_RETURN(Model after, MakeModel(world));
  Optimizer unit_wise(inside->Parameters(), options);
  Optimizer at_once(after->Parameters(), options);
  FSDP_RETURN_IF_ERROR(
      inside->StepInBackward([&](absl::Span<const TensorRange> unit) {
        return unit_wise.StepUnit(unit);
      }));
  for (int step = 0; step < kSteps; ++step) {
    FSDP_RETURN_IF_ERROR(Backward(inside, PartOf(world, step)));
    FSDP_RETURN_IF_ERROR(Backward(after, PartOf(world, step)));
    at_once.step();
    at_once.zero_grad();
    FSDP_RETURN_IF_ERROR(ExpectEqualShards(inside, after));
    for (const at::Tensor& shard : inside->Parameters()) {
      EXPECT_FALSE(shard.grad().defined());
    }
  }
  return absl::OkStatus();
}

TEST(FusedModelTest, StepsUnitsInBackwardToTheSameBits) {
  for (const int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& world) -> absl::Status {
      FSDP_RETURN_IF_ERROR(
          CheckInBackward<FusedAdamW>(world, AdamWOptions(1e-2)));
      return CheckInBackward<FusedSGD>(
          world, SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
    })) << world_size;
  }
}

template <typename First, typename Second>
absl::Status CheckContinues(Communicator& world) {
  FSDP_ASSIGN_OR_RETURN(Model unbroken, MakeModel(world));
  FSDP_ASSIGN_OR_RETURN(Model resumed, MakeModel(world));
  First first(unbroken->Parameters(), AdamWOptions(1e-2).amsgrad(true));
  Second second(resumed->Parameters(), AdamWOptions(7));
  for (int step = 0; step < 2 * kSteps; ++step) {
    if (step == kSteps) {
      FSDP_ASSIGN_OR_RETURN(const StateDict dict, unbroken->GatherStateDict());
      FSDP_RETURN_IF_ERROR(resumed->LoadStateDict(dict));
      FSDP_ASSIGN_OR_RETURN(const OptimizerStateDict state,
                            unbroken->GatherOptimizerState(first));
      FSDP_RETURN_IF_ERROR(resumed->LoadOptimizerState(second, state));
    }
    first.zero_grad();
    FSDP_RETURN_IF_ERROR(Backward(unbroken, PartOf(world, step)));
    first.step();
    if (step < kSteps) continue;
    second.zero_grad();
    FSDP_RETURN_IF_ERROR(Backward(resumed, PartOf(world, step)));
    second.step();
  }
  for (size_t i = 0; i < resumed->Parameters().size(); ++i) {
    EXPECT_TRUE(at::allclose(resumed->Parameters()[i],
                             unbroken->Parameters()[i], 1e-4, 1e-5))
        << resumed->Ranges()[i].name;
  }
  return absl::OkStatus();
}

TEST(FusedModelTest, StateDictsMoveBetweenItAndTorchs) {
  for (const int world_size : {1, 2, 3}) {
    EXPECT_OK(RunAllRanks(world_size, [](Communicator& world) -> absl::Status {
      FSDP_RETURN_IF_ERROR(
          (CheckContinues<FusedAdamW, torch::optim::AdamW>(world)));
      return CheckContinues<torch::optim::AdamW, FusedAdamW>(world);
    })) << world_size;
  }
}

TEST(FusedModelTest, StepsByGradientsOfLowPrecision) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& world) -> absl::Status {
    Options options = BlockUnits();
    options.unit.precision = ComputeIn(at::kBFloat16);
    options.unit.precision.reduce_dtype = at::kBFloat16;
    options.unit.precision.keep_low_precision_grads = true;
    FSDP_ASSIGN_OR_RETURN(Model low, MakeModel(world, options));
    options.unit.precision.keep_low_precision_grads = false;
    FSDP_ASSIGN_OR_RETURN(Model full, MakeModel(world, options));
    FusedAdamW of_low(low->Parameters(), AdamWOptions(1e-2));
    FusedAdamW of_full(full->Parameters(), AdamWOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      FSDP_RETURN_IF_ERROR(Backward(low, PartOf(world, step)));
      FSDP_RETURN_IF_ERROR(Backward(full, PartOf(world, step)));
      EXPECT_TRUE(low->Parameters()[0].grad().scalar_type() == at::kBFloat16 &&
                  full->Parameters()[0].grad().scalar_type() == at::kFloat);
      // Copies values that half the bits hold, whatever the scaling after
      // reductions.
      for (size_t i = 0; i < low->Parameters().size(); ++i) {
        full->Parameters()[i].grad().copy_(low->Parameters()[i].grad());
      }
      of_low.step();
      of_full.step();
      of_low.zero_grad();
      of_full.zero_grad();
    }
    return ExpectEqualShards(low, full);
  }));
}

// A unit's gradient is freed although the optimizer has seen it.
TEST(FusedModelTest, KeepsNoGradients) {
  const auto train = [](Communicator& world) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(Model model, MakeModel(world));
    FusedAdamW optimizer(model->Parameters());
    for (int step = 0; step < 2; ++step) {
      FSDP_RETURN_IF_ERROR(Backward(model, PartOf(world, step)));
      optimizer.step();
      const at::Tensor gradient = model->Parameters()[0].grad();
      optimizer.zero_grad();
      // The users are this tensor and, on several ranks, that of the gradient
      // buffer.
      const size_t users = world.world_size() == 1 ? 1 : 2;
      EXPECT_TRUE(gradient.use_count() == 1 &&
                  gradient.storage().use_count() == users)
          << gradient.storage().use_count() << " users";
    }
    return absl::OkStatus();
  };
  EXPECT_OK(RunAllRanks(1, train));
  EXPECT_OK(RunAllRanks(2, train));
}

}  // namespace
}  // namespace fsdp::testing
