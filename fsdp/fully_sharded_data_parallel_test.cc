#include "fsdp/fully_sharded_data_parallel.h"

// Compares trainings of sharded models with those of one plain model.
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "fsdp/testing/sharded_test.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kDim = 7;
constexpr int kBlocks = 3;
constexpr int64_t kRowsPerRank = 4;

using Tensors = std::map<std::string, at::Tensor>;

struct Trained {
  std::vector<double> losses;
  Tensors parameters;
};

// Trains in one process with `world_size` times as many rows per step.
Trained TrainPlain(int world_size, int steps) {
  Trained result;
  std::shared_ptr<NetImpl> net = MakeNet(kDim, kBlocks);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x =
        Rows(kRowsPerRank * world_size * step, kRowsPerRank * world_size, kDim);
    at::Tensor loss = Loss(net->forward(x), x);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& item : net->named_parameters()) {
    result.parameters[item.key()] = item.value().detach().clone();
  }
  return result;
}

absl::Status FullParameters(FullyShardedDataParallel<NetImpl>& model,
                            Tensors& result) {
  return model->ForEachFullParameter(
      [&result](const std::string& name, const at::Tensor& value) {
        result[name] = value.clone();
        return absl::OkStatus();
      });
}

// Trains sharded; `losses` are means over ranks.
absl::Status TrainSharded(Communicator& communicator, const Options& options,
                          int steps, Trained& result) {
  FSDP_ASSIGN_OR_RETURN(
      FullyShardedDataParallel<NetImpl> model,
      FullyShard(MakeNet(kDim, kBlocks), Unowned(communicator), options));
  torch::optim::AdamW optimizer(model->Parameters(), 1e-2);
  const int world_size = communicator.world_size();
  for (int step = 0; step < steps; ++step) {
    const at::Tensor x =
        Rows((step * world_size + communicator.rank()) * kRowsPerRank,
             kRowsPerRank, kDim);
    at::Tensor loss = Loss(model->forward(x), x);
    optimizer.zero_grad();
    FSDP_RETURN_IF_ERROR(model->Backward(loss));
    optimizer.step();
    at::Tensor mean = loss.detach().view({1}) / world_size;
    FSDP_ASSIGN_OR_RETURN(
        auto work, communicator.AllReduce(mean, comm::ReduceOp::kSum, "loss"));
    FSDP_RETURN_IF_ERROR(work->Wait(absl::Now() + absl::Seconds(30)));
    result.losses.push_back(mean.item<double>());
  }
  return FullParameters(model, result.parameters);
}

absl::Status CheckClose(const Trained& actual, const Trained& expected) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    const double error = std::abs(actual.losses[i] - expected.losses[i]);
    if (error > 1e-5 * std::abs(expected.losses[i])) {
      return absl::InternalError(absl::StrCat("loss of step ", i, ": ",
                                              actual.losses[i], " not ",
                                              expected.losses[i]));
    }
  }
  for (const auto& [name, value] : expected.parameters) {
    const auto found = actual.parameters.find(name);
    if (found == actual.parameters.end() ||
        !at::allclose(found->second, value, 1e-4, 1e-5)) {
      return absl::InternalError(absl::StrCat("parameter ", name, " differs"));
    }
  }
  return absl::OkStatus();
}

struct OptionsCase {
  const char* name;
  bool reshard;
  bool prefetch;
  bool units;
};

class EqualsPlainTraining
    : public ::testing::TestWithParam<std::tuple<int, OptionsCase>> {};

TEST_P(EqualsPlainTraining, LossesAndParametersAfterTenSteps) {
  const auto& [world_size, c] = GetParam();
  Options options = c.units ? BlockUnits() : Options();
  options.unit.strategy =
      c.reshard ? ShardingStrategy::kFullShard : ShardingStrategy::kShardGradOp;
  options.prefetch.forward = c.prefetch;
  options.prefetch.backward = c.prefetch;
  const Trained expected = TrainPlain(world_size, 10);
  EXPECT_OK(RunAllRanks(
      world_size, [&, &options = options](Communicator& communicator) {
        Trained actual;
        FSDP_RETURN_IF_ERROR(TrainSharded(communicator, options, 10, actual));
        return CheckClose(actual, expected);
      }));
}

INSTANTIATE_TEST_SUITE_P(
    All, EqualsPlainTraining,
    ::testing::Combine(
        ::testing::Values(1, 2, 3, 5, 8),
        ::testing::Values(OptionsCase{"FullShard", true, true, true},
                          OptionsCase{"NoPrefetch", true, false, true},
                          OptionsCase{"KeptAfterForward", false, true, true},
                          OptionsCase{"RootOnly", true, true, false})),
    [](const auto& info) {
      return absl::StrCat(std::get<1>(info.param).name, "World",
                          std::get<0>(info.param));
    });

TEST(TrainingTest, IsBitEqualToPlainTrainingAtOneRank) {
  const Trained expected = TrainPlain(1, 10);
  Trained actual;
  ASSERT_OK(RunAllRanks(1, [&actual](Communicator& communicator) {
    return TrainSharded(communicator, BlockUnits(), 10, actual);
  }));
  EXPECT_EQ(actual.losses, expected.losses);
  ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
  for (const auto& [name, value] : expected.parameters) {
    EXPECT_TRUE(at::equal(actual.parameters[name], value)) << name;
  }
}

TEST(TrainingTest, IsBitEqualFromRunToRunAndBetweenRanks) {
  std::vector<Trained> runs(6);
  for (int run = 0; run < 2; ++run) {
    ASSERT_OK(RunAllRanks(3, [&](Communicator& communicator) {
      return TrainSharded(communicator, BlockUnits(), 5,
                          runs[3 * run + communicator.rank()]);
    }));
  }
  for (const Trained& other : runs) {
    EXPECT_EQ(other.losses, runs.front().losses);
    for (const auto& [name, value] : runs.front().parameters) {
      EXPECT_TRUE(at::equal(other.parameters.at(name), value)) << name;
    }
  }
}

// --- Collectives and memory of a step ----------------------------------------

absl::Status Step(FullyShardedDataParallel<NetImpl>& model) {
  const at::Tensor x = Rows(model->communicator().rank(), kRowsPerRank, kDim);
  at::Tensor loss = Loss(model->forward(x), x);
  FSDP_RETURN_IF_ERROR(model->Backward(loss));
  for (at::Tensor& shard : model->Parameters()) shard.mutable_grad().reset();
  return absl::OkStatus();
}

absl::Status CheckCounts(const comm::CollectiveLog& log, int64_t gathers,
                         int64_t reductions) {
  FSDP_RETURN_IF_ERROR(
      CheckThat(log.TotalsOf(comm::Collective::kAllGather).count, Eq(gathers),
                "all-gathers"));
  return CheckThat(log.TotalsOf(comm::Collective::kReduceScatter).count,
                   Eq(reductions), "reduce-scatters");
}

TEST(TrainingTest, AStepTakes2nMinus1AllGathersAndNReduceScatters) {
  ASSERT_OK_AND_ASSIGN(auto group, comm::CreateLocalGroup(2));
  std::vector<comm::CollectiveLog> logs(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    group[rank] = comm::Record(std::move(group[rank]), &logs[rank]);
  }
  const auto run = [&logs](Communicator& communicator) -> absl::Status {
    comm::CollectiveLog& log = logs[communicator.rank()];
    FSDP_ASSIGN_OR_RETURN(FullyShardedDataParallel<NetImpl> model,
                          FullyShard(MakeNet(kDim, kBlocks),
                                     Unowned(communicator), BlockUnits()));
    constexpr int64_t kUnits = kBlocks + 1;
    for (int step = 0; step < 3; ++step) {
      log.Clear();
      FSDP_RETURN_IF_ERROR(Step(model));
      FSDP_RETURN_IF_ERROR(CheckCounts(log, 2 * kUnits - 1, kUnits));
    }
    log.Clear();
    c10::NoGradGuard no_grad;
    model->forward(Rows(0, 1, kDim));
    FSDP_RETURN_IF_ERROR(
        CheckThat(model->memory_stats().parameters.in_use_bytes, Eq(0),
                  "bytes of parameters after evaluation"));
    return CheckCounts(log, kUnits, 0);
  };
  EXPECT_OK(AllOk(comm::testing::RunRanks(group, run)));
}

TEST(TrainingTest, HoldsTheRootAndTwoUnitsAtMostAndOnlyShardsAfterAStep) {
  EXPECT_OK(RunAllRanks(2, [](Communicator& communicator) -> absl::Status {
    FSDP_ASSIGN_OR_RETURN(
        FullyShardedDataParallel<NetImpl> model,
        FullyShard(MakeNet(kDim, 6), Unowned(communicator), BlockUnits()));
    int64_t root = 0;
    int64_t block = 0;
    FSDP_RETURN_IF_ERROR(model->ForEachFullParameter(
        [&](const std::string& name, const at::Tensor& value) {
          // Rounds up to the alignment of parameters and shards.
          const int64_t bytes = (value.nbytes() + 15) / 16 * 16;
          if (name.find("blocks.0.") == 0) block += bytes;
          if (name.find("blocks.") != 0) root += bytes;
          return absl::OkStatus();
        }));
    root = (root + 31) / 32 * 32;
    block = (block + 31) / 32 * 32;
    for (int step = 0; step < 3; ++step) {
      FSDP_RETURN_IF_ERROR(Step(model));
      const MemoryStats stats = model->memory_stats();
      FSDP_RETURN_IF_ERROR(CheckThat(stats.parameters.peak_in_use_bytes,
                                     Le(root + 2 * block), "peak"));
      FSDP_RETURN_IF_ERROR(CheckThat(stats.parameters.in_use_bytes, Eq(0),
                                     "bytes of parameters after a step"));
      FSDP_RETURN_IF_ERROR(CheckThat(stats.gradients.in_use_bytes, Eq(0),
                                     "bytes of gradients after a step"));
    }
    return absl::OkStatus();
  }));
}

TEST(TrainingTest, ThePeakOfManagedMemoryIsThatOfThePlan) {
  std::vector<Options> all(5, BlockUnits());
  all[1].prefetch.forward = false;
  all[1].prefetch.backward = false;
  all[2].unit.precision.param_dtype = at::kBFloat16;
  all[3].unit.precision.param_dtype = at::kBFloat16;
  all[3].unit.precision.reduce_dtype = at::kFloat;
  all[4].unit.strategy = ShardingStrategy::kShardGradOp;
  for (int ranks : {1, 2, 3}) {
    for (size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, options ", i));
      EXPECT_OK(RunAllRanks(ranks, [&](Communicator& c) -> absl::Status {
        FSDP_ASSIGN_OR_RETURN(
            FullyShardedDataParallel<NetImpl> model,
            FullyShard(MakeNet(/*dim=*/64, 6), Unowned(c), all[i]));
        for (int step = 0; step < 3; ++step) {
          const at::Tensor x = Rows(c.rank(), kRowsPerRank, 64);
          FSDP_RETURN_IF_ERROR(model->Backward(Loss(model->forward(x), x)));
        }
        const MemoryStats stats = model->memory_stats();
        const MemoryPlan plan = model->PlanMemory();
        const auto planned =
            static_cast<double>(plan.gathered + plan.in_flight);
        return CheckThat(
            static_cast<double>(stats.parameters.peak_in_use_bytes +
                                stats.gradients.peak_in_use_bytes),
            ::testing::DoubleNear(planned, 0.02 * planned), "peak in use");
      }));
    }
  }
}

}  // namespace
}  // namespace fsdp::testing
